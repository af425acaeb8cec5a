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


def refuse_sharded(model: nn.Module) -> None:
    """Raise for a sharded model whose forward is to be emitted as a graph."""
    if is_sharded(model):
        raise CaptureError(
            "The model is sharded with fully_shard, which gathers parameters where modules are "
            "called, and an emitted graph calls none. Optimize it with emit='modules' before it "
            "is sharded."
        )


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
    undo: list[tuple[nn.Module, list[dict[int, Any]], Any]] = []
    for name, part in model.named_modules():
        if part is model or not _is_wrapped(part):
            continue
        tables: Any = (part._forward_pre_hooks, part._forward_hooks)
        taken = [_without_hooks(table) for table in tables]
        given = _Given(part, name, _policy(part), stand)
        handles = (
            part.register_forward_pre_hook(given.enter, prepend=True, with_kwargs=True),
            part.register_forward_hook(given.leave, always_call=True),
        )
        undo.append((part, taken, handles))
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
    parameters = {id(p): p for p in model.parameters()}.values()
    gathered = {id(parameter) for parameter in _roots_own(model)}
    world = _world(model)
    local = {id(p): _shard_bytes(p, world if id(p) in gathered else 1) for p in parameters}
    return replace(
        problem,
        values=tuple(replace(v, leaf=v.leaf and not v.parameter) for v in problem.values),
        parameter_bytes=sum(local.values()),
        gradient_bytes=sum(local[id(p)] for p in parameters if p.requires_grad),
    )


def gathered_bytes(model: nn.Module) -> int:
    """Give the bytes that FSDP2 holds on a rank, besides its shards, at the worst instant.

    The root's parameters and their gradients stay through backward. Of the largest wrapped
    module inside there are at once, while backward goes from one to the next: its parameters,
    those of the next as they arrive and as they are laid out, its gradients, and what is being
    reduced of it and of the one before, which a slow network holds on to. Modules that are not
    sharded again after their forward, or fetched further ahead, add their parameters.
    """
    if not is_sharded(model):
        return 0
    own = sum(p.numel() * p.element_size() for p in _roots_own(model))
    wrapped = [m for m in model.modules() if m is not model and isinstance(m, FSDPModule)]
    largest = max((_in_transit(module) for module in wrapped), default=0)
    staying = sum(_whole_bytes(module) for module in wrapped if _stays(module))
    ahead = max((_fetched_ahead(module) for module in wrapped), default=0)
    further = max(0, ahead - 1) * 2 * max(map(_whole_bytes, wrapped), default=0)
    return 2 * own + max(own, largest) + staying + further


def _in_transit(module: Any) -> int:
    policy = _policy(module)
    total = 0
    for _, _, parameter in _managed(module):
        dtype = policy.param_dtype or parameter.dtype
        reduced = (policy.reduce_dtype or dtype).itemsize
        gradients = dtype.itemsize + 2 * reduced if parameter.requires_grad else 0
        total += parameter.numel() * (3 * dtype.itemsize + gradients)
    return total


def _whole_bytes(module: Any) -> int:
    policy = _policy(module)
    return sum(
        int(p.numel()) * (policy.param_dtype or p.dtype).itemsize for _, _, p in _managed(module)
    )


def _stays(module: Any) -> bool:
    """Whether a wrapped module keeps its parameters, or part of them, from forward to backward."""
    state = module._get_fsdp_state()
    # Before torch 2.13 a module had one group at most.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    groups = [group for group in groups if group is not None]
    return any(not g._reshard_after_forward or g._use_post_forward_mesh for g in groups)


def _fetched_ahead(module: Any) -> int:
    state = module._get_fsdp_state()
    return max(len(state._states_to_forward_prefetch), len(state._states_to_backward_prefetch))


def _roots_own(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that the root gathers itself: they are whole while its forward runs."""
    if not isinstance(model, FSDPModule):
        return []
    found: dict[int, nn.Parameter] = {}
    pending: list[nn.Module] = [model]
    while pending:
        part = pending.pop()
        found.update((id(p), p) for p in part._parameters.values() if p is not None)
        pending += [child for child in part.children() if not isinstance(child, FSDPModule)]
    return list(found.values())


def _world(model: nn.Module) -> int:
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return int(parameter.device_mesh.size())
    return dist.get_world_size() if dist.is_initialized() else 1


def _shard_bytes(parameter: Any, world: int) -> int:
    """Bytes of one rank's part of a parameter; the first dimension is dealt out."""
    if isinstance(parameter, DTensor):
        local = parameter._local_tensor
        return int(local.numel() * local.element_size())
    rows = parameter.shape[0] if parameter.dim() else 1
    nbytes = int(parameter.numel() * parameter.element_size())
    return -(-rows // world) * (nbytes // rows) if rows else 0


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


def _is_wrapped(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _policy(module: Any) -> Any:
    """Give the mixed precision policy of a wrapped module."""
    return module._get_fsdp_state()._mp_policy
