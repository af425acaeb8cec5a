"""A capture is not believed, it is checked against the model it was taken from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autockpt.capture.autograd_graph import graph_difference
from autockpt.capture.bits import as_bytes, identical
from autockpt.capture.calls import version
from autockpt.capture.captured import Capture
from autockpt.capture.guards import GuardMiss
from autockpt.capture.masks import comes_apart
from autockpt.capture.mode import Recorder
from autockpt.capture.patches import patched
from autockpt.capture.paths import forward_of, read_path, tensors_within
from autockpt.capture.refusals import drop, gone
from autockpt.capture.replay import replay
from autockpt.capture.restore import RandomState, untraced
from autockpt.capture.stream import Stream
from autockpt.capture.tree import Template
from autockpt.errors import CaptureError

Forward = Callable[..., Sequence[torch.Tensor]]
_SEED = 1_346_719_527


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What a forward left behind."""

    outputs: tuple[torch.Tensor, ...]
    buffers: tuple[torch.Tensor, ...]
    # Of the arguments: those that were written.
    inputs: tuple[torch.Tensor | None, ...]
    state: RandomState


def check(
    capture: Capture,
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    forward: Forward | None = None,
) -> None:
    """Compare the recorded forward with the plain one, to the bit.

    Outputs, buffers, inputs written in place, random state, and the autograd graphs node by
    node: on the batch itself, and on a second one (floats redrawn, integers permuted), which
    a value that was frozen by mistake does not survive. The second batch is left out where a
    guard or the model itself does not take it.

    Parameters
    ----------
    capture : Capture
    model : torch.nn.Module
        The recorded model; its plain ``forward`` is run.
    args, kwargs : sequence, mapping
        The recorded batch.
    forward : callable, optional
        ``forward(model, *tensors)`` returns the output tensors in template order: the emitted
        forward with no region. None replays the graph.

    Raises
    ------
    CaptureError
        If anything differs; names the first call, its module and source line.

    Notes
    -----
    Costs four forwards without grad in time, and the memory of one.
    """
    kwargs = dict(kwargs or {})
    plain_forward = forward_of(model)
    run = forward or (lambda root, *tensors: replay(capture, root, tensors))
    for second in (False, True):
        batch = _Batch(args, kwargs, redraw=second)
        if second and not batch.differs:
            return
        try:
            plain = _run(
                capture, model, batch, lambda a, k: _results(capture, model, plain_forward(*a, **k))
            )
        except Exception:
            if second:
                return
            raise
        try:
            ours = _run(
                capture, model, batch, lambda a, k: tuple(run(model, *capture.inputs.tensors(a, k)))
            )
        except GuardMiss as miss:
            if second:
                return
            raise CaptureError(
                f"The recorded forward misses its own guard on the recorded batch: {miss}. "
                "The model does not do the same twice; it cannot be captured."
            ) from miss
        except RuntimeError as error:
            if isinstance(error, CaptureError):
                raise
            which = "a second batch" if second else "the recorded batch"
            raise CaptureError(f"The captured forward fails on {which}: {error}") from error
        difference = _difference(plain, ours)
        if difference:
            place = _first_difference(capture, model, batch)
            which = "a second batch" if second else "the recorded batch"
            raise CaptureError(
                f"The captured forward differs from the model's on {which}: {difference}. "
                f"{place} Something there is not seen by torch's function mode (a value that "
                "python computed, a closure, an outside library); express it in torch calls."
            )


class _Batch:
    """The recorded arguments with fresh tensors at every run."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, redraw: bool) -> None:
        self._template, tensors = Template.describe((tuple(args), dict(kwargs)))
        generator = torch.Generator().manual_seed(0)
        self._tensors = [redrawn(t, generator) if redraw else t for t in tensors]
        self.redrawn = redraw
        self.differs = any(a is not b for a, b in zip(self._tensors, tensors, strict=True))

    def fresh(self, parameters: set[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments that may be written; the model's own tensors stay themselves."""
        copies = [t if id(t) in parameters else _copy(t) for t in self._tensors]
        built: tuple[tuple[Any, ...], dict[str, Any]] = self._template.build(copies)
        return built


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_inference():
        return tensor
    if tensor.layout is not torch.strided:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    with torch.no_grad():
        copy = torch.empty_like(tensor).copy_(tensor) if tensor._base is None else tensor.clone()
    if copy.stride() != tensor.stride():
        return tensor.detach().requires_grad_(tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def redrawn(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Another tensor that is as valid an input as this one.

    Floats are drawn anew with the same mean and deviation, integers change places; masks
    (no more than two distinct values, or infinities) stay as they are.
    """
    if tensor.is_meta or tensor.numel() < 2 or tensor.layout is not torch.strided:
        return tensor
    flat = tensor.detach().reshape(-1)
    if tensor.dtype is torch.bool or tensor.is_complex():
        return tensor
    low, high = flat.min(), flat.max()
    if not bool((flat != low).logical_and_(flat != high).any()):
        return tensor
    if tensor.is_floating_point():
        if not bool(flat.isfinite().all()):
            return tensor
        new = torch.randn(flat.shape, generator=generator, dtype=torch.float32).to(flat.device)
        new = new.mul_(flat.float().std()).add_(flat.float().mean()).to(tensor.dtype)
        new = torch.minimum(torch.maximum(new, low, out=new), high, out=new)
    else:
        new = flat[torch.randperm(flat.numel(), generator=generator).to(flat.device)]
    out = torch.empty_like(tensor.detach()).copy_(new.view(tensor.shape))
    return out.requires_grad_(tensor.requires_grad)


def _run(
    capture: Capture,
    model: torch.nn.Module,
    batch: _Batch,
    forward: Callable[[tuple[Any, ...], dict[str, Any]], tuple[torch.Tensor, ...]],
) -> _Run:
    own = {id(t) for t in (*model.parameters(), *model.buffers())}
    args, kwargs = batch.fresh(own)
    hooks = torch.autograd.graph.saved_tensors_hooks(drop, gone)
    with untraced(model, args, kwargs) as trace, torch.enable_grad():
        if batch.redrawn:
            # A forward that seeds the generator must not find it as it would leave it.
            torch.manual_seed(_SEED)
        for target in capture.writes:
            trace.before_write(read_path(model, target), known=True)
        given = [(t, version(t)) for _, t in tensors_within((args, kwargs), objects=True)]
        with hooks:
            outputs = forward(args, kwargs)
        return _Run(
            outputs=tuple(outputs),
            buffers=tuple(t.detach().clone() for t in model.buffers()),
            inputs=tuple(None if version(t) == number else t.detach() for t, number in given),
            state=RandomState(),
        )


def _results(capture: Capture, model: torch.nn.Module, output: Any) -> tuple[torch.Tensor, ...]:
    """Tensors of a forward's output, and of what it has left in attributes."""
    if capture.left:
        left = (vars(model.get_submodule(path))[name] for path, name in capture.left)
        output = (output, tuple(left))
    return Template.describe(output)[1]


def _difference(plain: _Run, ours: _Run) -> str:
    if len(plain.outputs) != len(ours.outputs):
        return f"{len(ours.outputs)} output tensors instead of {len(plain.outputs)}"
    for number, (a, b) in enumerate(zip(plain.outputs, ours.outputs, strict=True)):
        if not identical(a, b):
            return f"output tensor {number} is not equal"
        if a.requires_grad != b.requires_grad:
            return f"output tensor {number} requires grad in one of them only"
    for a, b in zip(plain.buffers, ours.buffers, strict=True):
        if not identical(a, b):
            return f"a buffer of shape {tuple(a.shape)} is not equal afterwards"
    for x, y in zip(plain.inputs, ours.inputs, strict=True):
        if x is not y and (x is None or y is None or not identical(x, y)):
            written = x if x is not None else y
            assert written is not None
            return f"an input of shape {tuple(written.shape)} is not equal afterwards"
    if not plain.state.torch_is(ours.state):
        return "the random state is not equal afterwards"
    return graph_difference(plain.outputs, ours.outputs)


def _first_difference(capture: Capture, model: torch.nn.Module, batch: _Batch) -> str:
    """Run both again with a fingerprint of every result, and say where they part."""
    ours: dict[fx.Node, str] = {}
    theirs: list[tuple[fx.Node, str]] = []
    own = {id(t) for t in (*model.parameters(), *model.buffers())}
    args, kwargs = batch.fresh(own)
    hooks = torch.autograd.graph.saved_tensors_hooks(drop, gone)
    with untraced(model, args, kwargs), torch.enable_grad(), hooks:
        tensors = capture.inputs.tensors(args, kwargs)
        with suppress(GuardMiss):
            replay(capture, model, tensors, visit=lambda n, v: ours.update({n: fingerprint(v)}))
    args, kwargs = batch.fresh(own)
    with untraced(model, args, kwargs) as trace, torch.enable_grad():
        stream = Stream(model, args, kwargs)
        recorder = Recorder(
            stream,
            trace,
            lambda node, value: theirs.append((node, fingerprint(value))),
            apart=comes_apart(capture.graph),
        )
        with patched(recorder), recorder, torch.autograd.graph.saved_tensors_hooks(drop, gone):
            forward_of(model)(*args, **kwargs)
    calls = [n for n in capture.graph.nodes if n in ours and "call" in n.meta]
    for node, (other, theirs_) in zip(calls, theirs, strict=False):
        if str(node.target) != str(other.target) or ours[node] != theirs_:
            meta = other.meta
            return (
                f"First at the call {other.name} in '{meta['module'] or 'the model'}' "
                f"({meta['source']})."
            )
    return ""


def fingerprint(value: Any) -> str:
    """Digest of the tensors in a value."""
    digest = hashlib.sha256()
    for _, tensor in tensors_within(value, objects=False):
        digest.update(repr((tensor.shape, tensor.dtype)).encode())
        if not tensor.is_meta and tensor.layout is torch.strided:
            digest.update(as_bytes(tensor).cpu().numpy().tobytes())
    return digest.hexdigest()
