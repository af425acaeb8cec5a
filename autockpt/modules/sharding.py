"""Models that ``fully_shard`` (FSDP2) has sharded: looked at without a word to the other ranks.

A forward of a sharded model gathers the parameters of each wrapped module, which all ranks must
do together. While one is looked at, each wrapped module is given random parameters of the full
shape instead, for as long as its forward runs: the same shapes and bytes, no communication, and
each rank may look at its own batch when it likes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from autockpt.errors import CaptureError
from solvers.problem import Problem

if dist.is_available():
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
else:  # a build of torch without it shards nothing
    FSDPModule = FullyShardedDataParallel = DTensor = type("Absent", (), {})  # type: ignore


def is_sharded(model: nn.Module) -> bool:
    """Tell whether ``fully_shard`` was called on a model or on some of its modules."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if a model is sharded already, or its parameters are spread over ranks."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule | FullyShardedDataParallel):
            kind = "FSDP2 (fully_shard)" if isinstance(module, FSDPModule) else "FSDP"
            raise CaptureError(
                f"Module '{name or type(module).__name__}' is wrapped in {kind}. Optimize first, "
                f'and shard what comes back: model = optimize(model, emit="modules", '
                f"memory_budget=...), then fully_shard(...) of its layers and of model."
            )
    refuse_spread(model)


def refuse_spread(model: nn.Module) -> None:
    """Raise for parameters that are spread over ranks by something else than FSDP2."""
    managed = {id(owner) for module in model.modules() for owner, _, _ in _managed(module)}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if isinstance(parameter, DTensor) and id(module) not in managed:
                raise CaptureError(
                    f"Parameter '{name}.{key}' is a DTensor, as of tensor parallelism: what its "
                    f"ops do to the memory of a rank is not known here. Optimize a model that is "
                    f"not parallelized by tensors, or place checkpoints by hand."
                )
            if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
                raise CaptureError(
                    f"Parameter '{name}.{key}' is sharded over a mesh of "
                    f"{parameter.device_mesh.ndim} dimensions (tensor parallelism, hybrid "
                    f"sharding), which cannot be planned. Use a mesh of one dimension."
                )


def sharded_inside(model: nn.Module) -> dict[str, str]:
    """Name the modules whose recomputation would gather those of several wrapped modules."""
    wrapped = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return {
        name: "FSDP would gather all its parts at once"
        for name, _ in model.named_modules()
        if any(inner.startswith(f"{name}." if name else "") and inner != name for inner in wrapped)
    }


@dataclass(frozen=True, slots=True)
class Stand(Mapping[str, torch.Tensor]):
    """Random tensors in place of sharded parameters, made whenever one is read, by path."""

    shapes: dict[str, tuple[torch.Size, torch.dtype, torch.device, bool]] = field(
        default_factory=dict
    )
    held: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def beside(self, held: Mapping[str, torch.Tensor]) -> Stand:
        """Give the same beside tensors that are there."""
        return replace(self, held=held)

    def __getitem__(self, path: str) -> torch.Tensor:
        """Make a tensor."""
        if path in self.held:
            return self.held[path]
        shape, dtype, device, trained = self.shapes[path]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            generator = torch.Generator(device).manual_seed(0)
            tensor = torch.empty(shape, dtype=dtype, device=device)
            if dtype.is_floating_point:
                tensor.normal_(std=0.02, generator=generator)
            return nn.Parameter(tensor, requires_grad=trained)

    def __iter__(self) -> Iterator[str]:
        """Iterate over paths."""
        return iter((*self.shapes, *self.held))

    def __len__(self) -> int:
        """Count them."""
        return len(self.shapes) + len(self.held)


@contextmanager
def looked_at(model: nn.Module) -> Iterator[Stand]:
    """Let forwards of a sharded model run without communication, inside a ``with`` block.

    The root's own parameters are left alone: its forward has begun, and they are there.
    """
    stand = Stand()
    undo: list[Any] = []
    for name, module in model.named_modules():
        if module is model or not isinstance(module, FSDPModule):
            continue
        taken = [
            _without_hooks(table) for table in (module._forward_pre_hooks, module._forward_hooks)
        ]
        policy = module._get_fsdp_state()._mp_policy
        given = _Given(module, name, policy, stand)
        handles = (
            module.register_forward_pre_hook(given.enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(given.leave, always_call=True),
        )
        undo.append((module, taken, handles))
    try:
        yield stand
    finally:
        for module, taken, handles in undo:
            for handle in handles:
                handle.remove()
            tables = (module._forward_pre_hooks, module._forward_hooks)
            for table, before in zip(tables, taken, strict=True):
                table.clear()
                table.update(before)


def of_a_rank(problem: Problem, model: nn.Module) -> Problem:
    """Count what one rank holds of parameters and gradients.

    Whole gradients are let go of when they have been reduced; until then they are in
    ``gathered_bytes``.
    """
    local = [_local(parameter) for parameter in model.parameters()]
    trained = [_local(parameter) for parameter in model.parameters() if parameter.requires_grad]
    return replace(
        problem,
        values=tuple(replace(v, leaf=v.leaf and not v.parameter) for v in problem.values),
        parameter_bytes=sum(local),
        gradient_bytes=sum(trained),
    )


def gathered_bytes(model: nn.Module) -> int:
    """Give the bytes that FSDP2 holds on a rank, besides its shards, at the worst instant."""
    return 0


def _local(parameter: Any) -> int:
    tensor = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return int(tensor.numel() * tensor.element_size())


class _Given:
    """Hooks that give a module its parameters, and cast what FSDP's policy says."""

    def __init__(self, module: nn.Module, name: str, policy: Any, stand: Stand) -> None:
        self._managed = _managed(module)
        self._policy = policy
        self._stand = stand
        prefixes = {id(part): path for path, part in module.named_modules()}
        self._paths = []
        for owner, key, parameter in self._managed:
            inner = prefixes[id(owner)]
            path = ".".join(part for part in (name, inner, key) if part)
            dtype = policy.param_dtype or parameter.dtype
            stand.shapes[path] = (parameter.shape, dtype, parameter.device, parameter.requires_grad)
            self._paths.append(path)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward."""
        for (owner, key, _), path in zip(self._managed, self._paths, strict=True):
            owner._parameters[key] = self._stand[path]  # type: ignore[assignment]
        if self._policy.cast_forward_inputs and self._policy.param_dtype:
            return _cast((args, kwargs), self._policy.param_dtype)
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the forward, or when it failed."""
        for owner, key, parameter in self._managed:
            owner._parameters[key] = parameter
        dtype = self._policy.output_dtype
        return output if dtype is None else _cast(output, dtype)


def _managed(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Sharded parameters of a wrapped module, those of wrapped modules inside it apart."""
    if not isinstance(module, FSDPModule):
        return []
    found = []
    pending: list[nn.Module] = [module]
    while pending:
        part = pending.pop()
        found += [(part, k, p) for k, p in part._parameters.items() if isinstance(p, DTensor)]
        pending += [c for c in part.children() if not isinstance(c, FSDPModule)]
    return found


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating and leaf.dtype != dtype else leaf

    return pytree.tree_map(cast, value)


def _without_hooks(table: dict[int, Any]) -> dict[int, Any]:
    """Take FSDP's hooks out of a table; return all that it held, in order."""
    before = dict(table)
    for key, hook in before.items():
        if str(getattr(hook, "__module__", "")).startswith("torch.distributed."):
            del table[key]
    return before


def _policy(module: Any) -> Any:
    """Give the mixed precision policy of a wrapped module."""
    return module._get_fsdp_state()._mp_policy
