"""One training step of a model: forward, loss, backward; and what it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from autockpt.batch import checked_batch
from autockpt.capture import Template
from autockpt.capture.calls import version
from autockpt.capture.externals import attribute_generators
from autockpt.capture.losses import default_loss
from autockpt.capture.paths import tensors_within
from autockpt.capture.restore import put_back, write_back
from autockpt.errors import ProfileError
from autockpt.meters import CpuMeter, Meter, collector_off, meter
from autockpt.profiler import device_of, fixed_bytes
from autockpt.profiler.tensors import distinct
from autockpt.units import format_bytes

Loss = Callable[[Any], torch.Tensor]
Gradients = Literal["resident", "fresh"]


def loss_of(output: Any, loss: Loss | None) -> torch.Tensor:
    """The scalar that is differentiated.

    ``loss(output)`` where a loss is given; else the output's ``.loss``, else a scalar output,
    else the sum of all differentiable floating outputs.

    Raises
    ------
    CaptureError
        If there is none.

    Examples
    --------
    >>> loss_of(torch.ones(2, requires_grad=True), None)
    tensor(2., grad_fn=<SumBackward0>)
    """
    if loss is not None:
        return _scalar(loss(output), "loss(outputs)")
    _, tensors = Template.describe(output)
    return default_loss(output, tensors)


def _scalar(value: torch.Tensor, what: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"{what} must be a tensor with one element, got {shape}.")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one real step took.

    Attributes
    ----------
    peak_bytes : int
        Most bytes alive at once, fixed bytes included.
    activation_peak_bytes : int
        The same above the level at the start of the step.
    fixed_bytes : int
        Parameters, buffers and the batch, and the gradients where they are resident.
    step_seconds : float
        Least wall time of a forward and backward.
    gradients : {"resident", "fresh"}
    forward_levels, backward_levels : tuple of int
        Bytes alive, fixed bytes included, after each allocation and release of forward, loss
        included, and of backward; empty where the allocator does not tell (on cuda).
    """

    peak_bytes: int
    activation_peak_bytes: int
    fixed_bytes: int
    step_seconds: float
    gradients: Gradients
    forward_levels: tuple[int, ...] = field(default=(), repr=False)
    backward_levels: tuple[int, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return (
            f"peak {format_bytes(self.peak_bytes)} "
            f"({format_bytes(self.activation_peak_bytes)} above "
            f"{format_bytes(self.fixed_bytes)}, gradients {self.gradients}), "
            f"{self.step_seconds:.3f} s a step"
        )


def measure(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    gradients: Gradients = "resident",
    repeats: int = 1,
) -> Measurement:
    """Run real training steps and say what the allocator and the clock saw.

    Parameters
    ----------
    model : nn.Module
        Plain or optimized. Its gradients and buffers and the random state are put back (not a
        parameter that its forward writes: a copy of all of them may be too much to hold).
    args, kwargs
        The batch. What a forward writes in place is put back before each step and at the end.
    loss : callable, optional
        As for ``optimize``.
    gradients : {"resident", "fresh"}
        Whether ``.grad`` is there when the step starts (accumulation) or not
        (``zero_grad(set_to_none=True)``).
    repeats : int
        Steps that are timed; the least time counts.

    Raises
    ------
    ProfileError
        If the device runs out of memory, or its allocator cannot be watched.
    TypeError, ValueError
        For arguments that are none.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    >>> measure(model, (torch.ones(4, 8),)).fixed_bytes
    704
    """
    batch = checked_batch(args, kwargs)
    if gradients not in ("resident", "fresh"):
        raise ValueError(f"gradients={gradients!r} is neither 'resident' nor 'fresh'.")
    _check_repeats(repeats)
    tensors = distinct(tensor for _, tensor in tensors_within(batch, objects=True))
    device = device_of(model, tensors)
    step = _Step(model, *batch, loss)
    with undone(model, tensors), rewritten(batch) as put_back_batch:
        fixed = fixed_bytes(model, tensors)
        try:
            set_gradients(model, tensors, gradients)
            torch.clear_autocast_cache()
            watch = meter(device)
            with collector_off(), watch:
                step(watch.mark)
            times = []
            for _ in range(repeats):
                put_back_batch()
                times.append(_timed(step, model, tensors, gradients, device))
        except torch.OutOfMemoryError as error:
            raise ProfileError(
                f"The device ran out of memory while a step of {type(model).__name__} was "
                f"measured. Measure a smaller batch, or plan without measuring."
            ) from error
    peak = watch.span("start", "stop").peak_bytes
    total = sum(fixed.values()) - (fixed["gradient_bytes"] if gradients == "fresh" else 0)
    return Measurement(
        peak_bytes=total + peak,
        activation_peak_bytes=peak,
        fixed_bytes=total,
        step_seconds=min(times),
        gradients=gradients,
        **_levels(watch, total),
    )


def _check_repeats(repeats: object) -> None:
    if isinstance(repeats, bool) or not isinstance(repeats, int):
        raise TypeError(f"repeats={repeats!r} is not a whole number of steps.")
    if repeats < 1:
        raise ValueError(f"repeats={repeats!r}: at least one step has to be timed.")


def _levels(watch: Meter, total: int) -> dict[str, tuple[int, ...]]:
    if not isinstance(watch, CpuMeter):
        return {}
    levels = tuple(total + level for level in watch.levels("start", "stop"))
    forward = len(watch.levels("start", "backward"))
    return {"forward_levels": levels[:forward], "backward_levels": levels[forward:]}


def _unmarked(name: str) -> None:
    """Where a step is not measured."""


@dataclass(slots=True)
class _Step:
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Loss | None

    def __call__(self, mark: Callable[[str], None] = _unmarked) -> None:
        mark("start")
        # The output is held to the end of backward, as most training loops do.
        output = self.model(*self.args, **self.kwargs)
        loss = loss_of(output, self.loss)
        # As if the caller's autocast block ended here, which is where it should.
        torch.clear_autocast_cache()
        mark("backward")
        loss.backward()
        mark("stop")


def _timed(
    step: _Step,
    model: nn.Module,
    tensors: Sequence[torch.Tensor],
    gradients: Gradients,
    device: torch.device,
) -> float:
    set_gradients(model, tensors, gradients)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def trained(model: nn.Module, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that get a ``.grad``: parameters, and inputs that require grad."""
    leaves = {id(t): t for t in (*model.parameters(), *tensors) if t.requires_grad and t.is_leaf}
    return list(leaves.values())


def set_gradients(model: nn.Module, tensors: Sequence[torch.Tensor], gradients: Gradients) -> None:
    """Make every gradient resident (zeros) or absent."""
    for leaf in trained(model, tensors):
        leaf.grad = torch.zeros_like(leaf) if gradients == "resident" else None


@contextmanager
def rewritten(batch: Any) -> Iterator[Callable[[], None]]:
    """Yield a function that puts back what was written to a batch; do it at the end in any case."""
    tensors = {id(t): t for _, t in tensors_within(batch, objects=True) if not t.is_nested}
    copies = [(t, t.detach().clone(), version(t)) for t in tensors.values()]

    def put_back_all() -> None:
        with torch.no_grad():
            for tensor, copy, number in copies:
                put_back(tensor, copy, number)

    try:
        yield put_back_all
    finally:
        put_back_all()


@contextmanager
def undone(model: nn.Module, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put gradients, buffers and random states back afterwards."""
    leaves = trained(model, tensors)
    gradients = [leaf.grad for leaf in leaves]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states = [(generator, generator.get_state()) for generator in attribute_generators(model)]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    write_back(buffer, before)
            for generator, state in states:
                generator.set_state(state)
