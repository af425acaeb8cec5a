"""What tests of many kinds need: one step, its bits, its peak and its ops.

Nothing here uses the library, so that the library can be tested against it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tests.zoo import Case


@dataclass(frozen=True)
class Step:
    """What one step leaves behind."""

    loss: Tensor
    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    random_state: Tensor


def loss_of(output: Any, loss: Callable[[Any], Tensor] | None = None) -> Tensor:
    """The scalar that is differentiated."""
    if loss is not None:
        return loss(output)
    if isinstance(output, Tensor):
        return output if output.numel() == 1 else output.sum()
    return output["loss"] if isinstance(output, dict) else output.loss


def run_step(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    seed: int = 7,
) -> Step:
    """Run a step from a fixed random state and fresh gradients. Buffers move, as in training."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    output = model(*args, **(kwargs or {}))
    value = loss_of(output, loss)
    value.backward()
    gradients = {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    return Step(
        loss=value.detach().clone(),
        outputs=tuple(tensor.detach().clone() for tensor in leaves(output)),
        gradients=gradients,
        buffers={name: buffer.clone() for name, buffer in model.named_buffers()},
        random_state=torch.get_rng_state(),
    )


def run_case(case: Case, model: nn.Module | None = None, *, seed: int = 7) -> Step:
    """``run_step`` with a case's batch and loss, buffers put back afterwards."""
    chosen = case.model if model is None else model
    with buffers_restored(chosen):
        return run_step(chosen, case.args, case.kwargs, case.loss, seed=seed)


def assert_same_bits(expected: Step, found: Step) -> None:
    """Fail with the names of all that differs."""
    differences = list(_differences(expected, found))
    assert not differences, f"not equal to the bit: {', '.join(differences)}"


def _differences(expected: Step, found: Step) -> Iterator[str]:
    if not equal(expected.loss, found.loss):
        yield "loss"
    if len(expected.outputs) != len(found.outputs):
        yield f"{len(expected.outputs)} outputs against {len(found.outputs)}"
    for index, pair in enumerate(zip(expected.outputs, found.outputs, strict=False)):
        if not equal(*pair):
            yield f"output {index}"
    for what in ("gradients", "buffers"):
        first, second = getattr(expected, what), getattr(found, what)
        if list(first) != list(second):
            yield f"names of {what}"
        for name in (name for name in first if name in second):
            if not equal(first[name], second[name]):
                yield f"{what} {name}"
    if not equal(expected.random_state, found.random_state):
        yield "random state"


def equal(first: Tensor | None, second: Tensor | None) -> bool:
    """``torch.equal``, but of bits: NaN is NaN, and 0.0 is not -0.0."""
    if first is None or second is None:
        return first is second
    if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
        return False
    pair = (
        tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)
    )
    return torch.equal(*pair)


def leaves(value: Any) -> Iterator[Tensor]:
    """The tensors of an output, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(leaves(item) for item in value.values())
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(leaves(item) for item in value)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        yield from leaves(vars(value))


@contextmanager
def buffers_restored(*models: nn.Module) -> Iterator[None]:
    """Put the values of buffers back at the end."""
    copies = [(buffer, buffer.clone()) for model in models for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in copies:
                buffer.copy_(copy)


# Peaks


def peak_above_start(run: Callable[[], object]) -> int:
    """Highest level of CPU memory while ``run`` runs, in bytes above the level at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        kept = run()
    del kept
    events = trace.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((nbytes for _, nbytes in memory), initial=0))


def activation_peak_bytes(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> int:
    """Peak of one step with gradients resident, above the level at its start."""

    def step() -> Any:
        output = model(*args, **(kwargs or {}))
        loss_of(output, loss).backward()
        return output

    with buffers_restored(model):
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return peak_above_start(step)


def fixed_bytes(case: Case) -> int:
    """Parameters, their gradients, buffers and the batch, each storage once."""
    model = case.model
    tensors = [*model.parameters(), *model.buffers(), *leaves([case.args, case.kwargs])]
    tensors += list(leaves(case.loss)) if case.loss is not None else []
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return sum(storages.values()) + trained


# What ran


class CallCounter(TorchDispatchMode):
    """Counts the ATen calls of everything that runs inside, and their FLOPs.

    Not torch's ``FlopCounterMode``, which hooks every module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[str(func)] += 1
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def count_calls(run: Callable[[], object]) -> Counter[str]:
    """ATen calls by name, as ``aten.mm.default``."""
    with CallCounter() as counter:
        run()
    return counter.calls


def count_flops(run: Callable[[], object]) -> int:
    """FLOPs as torch counts them: matmuls, convolutions, attention unless it is CPU's fused one."""
    with CallCounter() as counter:
        run()
    return counter.flops


def recomputed_calls(case: Case, optimized: nn.Module) -> Counter[str]:
    """ATen calls that a step of ``optimized`` makes more often than the plain one."""
    plain = count_calls(lambda: run_case(case))
    # Saving and restoring random states, copies of statistics: not recomputation.
    mechanics = {"aten.detach.default", "aten.clone.default", "aten.alias.default"}
    more = count_calls(lambda: run_case(case, optimized)) - plain
    return Counter({name: count for name, count in more.items() if name not in mechanics})
