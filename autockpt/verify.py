"""Whether an optimized model trains to the same bits as the plain one, and inside its budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor, nn

from autockpt.batch import checked_batch
from autockpt.capture.calls import version
from autockpt.capture.externals import attribute_generators
from autockpt.capture.paths import format_steps, tensors_within
from autockpt.capture.restore import write_back
from autockpt.reports.tables import to_text
from autockpt.step import Loss, loss_of, measure
from autockpt.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What one real step of two models has shown.

    Attributes
    ----------
    differences : tuple of str
        What is not equal to the bit: ``"loss"``, ``"output.logits"``, ``"gradient of h.0.w"``,
        ``"buffer bn.running_mean"``, ``"random state of cpu"``. Empty if all is.
    compared : int
        How many things were compared.
    plain_peak_bytes, peak_bytes : int
        Measured peaks of a step, fixed bytes included, gradients resident.
    predicted_plain_peak_bytes, predicted_peak_bytes, budget_bytes : int or None
        What the optimized model's report says; None for a model that was not optimized.
    fixed_bytes : int
        Parameters, buffers, gradients and batch: part of every peak here.
    plain_step_seconds, step_seconds : float
        Times of the measured steps. For a comparison of times, interleave more of them.
    """

    differences: tuple[str, ...]
    compared: int
    plain_peak_bytes: int
    peak_bytes: int
    predicted_plain_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    budget_bytes: int | None = None
    fixed_bytes: int = 0
    plain_step_seconds: float = 0.0
    step_seconds: float = 0.0

    @property
    def same_bits(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak is at most the budget (True without one)."""
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

    @property
    def ok(self) -> bool:
        """Whether the bits are the same and the budget holds."""
        return self.same_bits and self.within_budget

    def __bool__(self) -> bool:
        return self.ok

    def __rich__(self) -> RenderableType:
        table = Table(title="One real step of each", title_justify="left")
        for name in ("", "plain", "optimized"):
            table.add_column(name, justify="right" if name else "left")
        rows = (
            ("peak, measured", self.plain_peak_bytes, self.peak_bytes),
            ("peak, predicted", self.predicted_plain_peak_bytes, self.predicted_peak_bytes),
            ("budget", None, self.budget_bytes),
            ("fixed bytes", self.fixed_bytes, self.fixed_bytes),
        )
        for name, plain, optimized in rows:
            table.add_row(name, _bytes(plain), _bytes(optimized))
        return Group(table, *self._verdicts())

    def _verdicts(self) -> Iterator[str]:
        if self.predicted_peak_bytes is None:
            yield "The second model was not made by autockpt.optimize."
        if self.same_bits:
            yield f"All {self.compared} things compared are equal to the bit."
        else:
            shown = ", ".join(self.differences[:8])
            more = len(self.differences) - 8
            yield f"{len(self.differences)} of {self.compared} things differ: {shown}" + (
                f", and {more} more." if more > 0 else "."
            )
        if not self.within_budget and self.budget_bytes is not None:
            over = format_bytes(self.peak_bytes - self.budget_bytes, round_up=True)
            yield f"The measured peak is {over} over the budget."

    def __str__(self) -> str:
        return to_text(self)


def verify(
    plain: nn.Module,
    optimized: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
) -> Verification:
    """Run one real step of both models and compare everything that a step leaves behind.

    Loss, outputs, every gradient (and whether there is one), parameters that are written, every
    buffer, the inputs and the random states after the step are compared to the bit; NaNs with
    equal bits are equal. Then the peak of a step of each is measured. Parameters, gradients,
    buffers, inputs and random states are put back as they were, so training goes on as if
    nothing had happened.

    Parameters
    ----------
    plain, optimized : Module
        They may share parameters and buffers, as ``optimize`` returns them. The second may be
        any module with the same parameter names: one with checkpoints by hand, for instance.
    args, kwargs
        The batch, as ``plain`` takes it.
    loss : callable, optional
        ``loss(output) -> scalar``; see ``optimize``.

    Returns
    -------
    Verification
        True in a condition if nothing differs and the budget holds.

    Raises
    ------
    TypeError
        If ``plain`` is what ``optimize`` returned: it would be compared with itself.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 1))
    >>> verify(model, model, (torch.randn(4, 8),)).differences
    ()
    """
    call_args, call_kwargs = checked_batch(args, kwargs)
    if hasattr(plain, "autockpt"):
        raise TypeError(
            f"verify(plain, optimized, ...) was given a {type(plain).__name__} that optimize "
            f"returned as the plain model. Write verify(model, planned, ...), the model that was "
            f"passed to optimize first: optimize leaves it as it was."
        )
    models = (plain, optimized)
    with _restored(models, call_args, call_kwargs) as put_back:
        # Gradients are fresh here: None says that no gradient came, and nothing is added to
        # them. The meter below has them resident, as the memory model does.
        expected = _step(plain, call_args, call_kwargs, loss)
        put_back()
        found = _step(optimized, call_args, call_kwargs, loss)
        put_back()
        differences = _compare(expected, found)
        compared = len(expected.keys() | found.keys())
        del expected, found
        before = measure(plain, call_args, call_kwargs, loss=loss)
        put_back()
        after = measure(optimized, call_args, call_kwargs, loss=loss)
    report = getattr(getattr(optimized, "autockpt", None), "report", None)
    return Verification(
        differences=differences,
        compared=compared,
        plain_peak_bytes=before.peak_bytes,
        peak_bytes=after.peak_bytes,
        predicted_plain_peak_bytes=getattr(report, "plain_peak_bytes", None),
        predicted_peak_bytes=getattr(report, "peak_bytes", None),
        budget_bytes=getattr(report, "budget_bytes", None),
        fixed_bytes=before.fixed_bytes,
        plain_step_seconds=before.step_seconds,
        step_seconds=after.step_seconds,
    )


def _step(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss | None
) -> dict[str, Any]:
    """Run forward and backward; return what they leave behind, by name."""
    versions = [(parameter, version(parameter)) for parameter in model.parameters()]
    with torch.enable_grad():
        output = model(*args, **kwargs)
        value = loss_of(output, loss)
    value.backward()
    written = {id(parameter) for parameter, then in versions if version(parameter) != then}
    left: dict[str, Any] = {"loss": value.detach().clone()}
    for steps, tensor in tensors_within(output, objects=True):
        left[f"output{format_steps(steps)}"] = tensor.detach().clone()
    for name, parameter in model.named_parameters():
        # The step owns its gradients: they are dropped, not changed, when state is put back.
        left[f"gradient of {name}"] = parameter.grad
        if id(parameter) in written:
            left[f"parameter {name}"] = parameter.detach().clone()
    for name, buffer in model.named_buffers():
        left[f"buffer {name}"] = buffer.detach().clone()
    for name, tensor in _inputs(args, kwargs):
        left[name] = tensor.detach().clone()
        left[f"gradient of {name}"] = tensor.grad
    return left | _random_states()


def _compare(expected: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    names = dict.fromkeys([*expected, *found])
    missing = object()
    return tuple(
        name
        for name in names
        if not same_bits(expected.get(name, missing), found.get(name, missing))
    )


def same_bits(first: Any, second: Any) -> bool:
    """Whether two tensors (or both None, or equal plain values) have the same bits.

    Examples
    --------
    >>> nan = torch.tensor([float("nan"), 0.0])
    >>> same_bits(nan, nan.clone()), same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    (True, False)
    """
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return type(first) is type(second) and bool(first == second)
    if (first.shape, first.dtype, first.device, first.layout) != (
        second.shape,
        second.dtype,
        second.device,
        second.layout,
    ):
        return False
    if first.layout is torch.sparse_coo:
        pair = first.coalesce(), second.coalesce()
        return same_bits(pair[0].indices(), pair[1].indices()) and same_bits(
            pair[0].values(), pair[1].values()
        )
    if first.layout in _COMPRESSED:
        return all(same_bits(part(first), part(second)) for part in _COMPRESSED[first.layout])
    return torch.equal(_raw(first), _raw(second))


_ROWS = (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values)
_COLUMNS = (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values)
_COMPRESSED: dict[torch.layout, tuple[Callable[[Tensor], Tensor], ...]] = {
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


def _raw(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for steps, tensor in tensors_within((args, kwargs), objects=True):
        yield f"input{format_steps(steps[1:])}", tensor


# Random states


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "random state of python": random.getstate(),
        "random state of numpy": _plain_numpy_state(),
        "random state of cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"random state of cuda:{index}"] = state
    return states


def _plain_numpy_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return (name, tuple(np.asarray(keys).tolist()), *rest)


@contextmanager
def _same_random_state() -> Iterator[Callable[[], None]]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    try:
        yield put_back
    finally:
        put_back()


# Everything a step changes


@contextmanager
def _restored(
    models: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Callable[[], None]]:
    """Yield a function that puts back what a step changes; do it at the end in any case.

    Until then gradients are None when it has been called, and as they were afterwards.
    """
    inputs = [tensor for _, tensor in _inputs(args, kwargs)]
    parameters = {id(p): p for model in models for p in model.parameters()}
    leaves: list[Tensor] = [*parameters.values()]
    leaves += [tensor for tensor in inputs if tensor.requires_grad and tensor.is_leaf]
    gradients = [leaf.grad for leaf in leaves]
    buffers = [
        (module, name, buffer)
        for model in models
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    held = (b for _, _, b in buffers if b is not None)
    # Parameters as well: a forward may clamp or move one.
    written = {id(t): t for t in [*inputs, *held, *parameters.values()]}
    copies = [(tensor, tensor.detach().clone()) for tensor in written.values()]
    generators = [g for model in models for g in attribute_generators(model)]
    states = [(generator, generator.get_state()) for generator in generators]

    def put_back() -> None:
        for leaf in leaves:
            leaf.grad = None
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
        with torch.no_grad():
            for tensor, copy in copies:
                # Untouched ones are left alone: a write would bump their version counters.
                if not same_bits(tensor, copy):
                    write_back(tensor, copy)
        for generator, state in states:
            generator.set_state(state)

    with _same_random_state() as put_back_random:

        def put_back_all() -> None:
            put_back()
            put_back_random()

        put_back_all()
        try:
            yield put_back_all
        finally:
            put_back()
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient


def _bytes(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)
