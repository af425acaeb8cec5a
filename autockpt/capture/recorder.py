"""Record a model's forward and loss: one real run, written down call by call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autockpt.capture.ambient import Ambient
from autockpt.capture.captured import Capture
from autockpt.capture.finish import finish
from autockpt.capture.key import Key
from autockpt.capture.losses import check_loss, default_loss
from autockpt.capture.mode import Recorder
from autockpt.capture.patches import patched
from autockpt.capture.paths import forward_of
from autockpt.capture.refusals import drop, gone, refuse_modes, refuse_modules
from autockpt.capture.restore import Trace, untraced
from autockpt.capture.stream import Stream
from autockpt.capture.tree import Template, held_by

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the recorded forward really returned.

    Attributes
    ----------
    outputs : tuple of Tensor
        Detached tensors of the model's output, in template order.
    loss : Tensor
        The detached scalar.
    closures : dict
        Tensors that the loss itself holds (labels, say), by target of their ``get_attr`` node.
    """

    outputs: tuple[torch.Tensor, ...]
    loss: torch.Tensor
    closures: dict[str, torch.Tensor] = field(default_factory=dict)


def record(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    *,
    apart: bool = True,
) -> tuple[Capture, Recorded]:
    """Run the model's forward and loss once and write down what happened.

    Parameters
    ----------
    model : torch.nn.Module
        Its ``forward`` is run, with gradients enabled; hooks on the root are not.
    args, kwargs : sequence, mapping
        One batch.
    loss : callable, optional
        ``loss(outputs) -> scalar``. None: the output's ``.loss``, else a scalar output, else
        the sum of all differentiable floating outputs.
    apart : bool
        Whether dropout is taken apart, so that its draw is an op of its own (``masks.py``).

    Returns
    -------
    capture : Capture
    recorded : Recorded

    Raises
    ------
    CaptureError
        If the forward cannot be captured faithfully; the message says why and where.

    Notes
    -----
    Needs the memory of a forward without grad. Leaves no trace: random states, buffers,
    attributes of modules and arguments written in place are as before. One exception: a plain
    setting that the first forward makes and later ones leave alone (``config.problem_type``
    in transformers) is made, as the first forward would.
    """
    kwargs = dict(kwargs or {})
    refuse_modules(model)
    refuse_modes()
    with untraced(model, args, kwargs) as trace, torch.enable_grad():
        found = _record(model, args, kwargs, loss, trace, apart)
        if found is None:
            # Something was made that is made once: the second forward finds it made.
            trace.settle()
            found = _record(model, args, kwargs, loss, trace, apart)
    assert found is not None
    return found


def _refuse_hidden(template: Template, stream: Stream) -> None:
    """Raise if the output holds a tensor of this step where it cannot be put anew at each call."""
    for value in template.opaque:
        if any(map(stream.is_of_step, held_by(value))):
            raise stream.refuse(
                f"a {type(value).__name__} holds a tensor of this step, and cannot be rebuilt",
                "Return it in a tuple, list, dict or dataclass.",
            )


def _record(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    loss: Loss | None,
    trace: Trace,
    apart: bool,
) -> tuple[Capture, Recorded] | None:
    trace.probe()
    stream = Stream(model, args, kwargs)
    ambient = Ambient.current(stream.device_types)
    key = Key.take(model, args, kwargs)
    recorder = Recorder(stream, trace, apart=apart)
    hooks = torch.autograd.graph.saved_tensors_hooks(drop, gone)
    with patched(recorder), recorder, hooks:
        output = forward_of(model)(*args, **kwargs)
        stream.returned = type(output).__name__
        recorder.paused += 1
        template, tensors = Template.describe(output)
        _refuse_hidden(template, stream)
        nodes = tuple(map(stream.node_of, tensors))
        recorder.paused -= 1
        stream.stage = "loss"
        found = default_loss(output, tensors) if loss is None else loss(output)
        recorder.paused += 1
        scalar = check_loss(found)
    changes = trace.verify(stream.drawn_in, stream.is_constant)
    if changes is None:
        return None
    if changes:
        template, tensors = Template.describe((output, tuple(change.now for change in changes)))
        nodes = tuple(map(stream.node_of, tensors))
    graph, signature = finish(stream.graph, (nodes, stream.node_of(scalar)), model)
    capture = Capture(
        graph=graph,
        inputs=stream.inputs,
        outputs=template,
        key=key,
        ambient=ambient,
        signature=signature,
        notes=tuple(stream.notes),
        writes=trace.written(model),
        left=tuple((str(change.module), change.name) for change in changes),
        calls=tuple(stream.called),
    )
    outputs = tuple(tensor.detach() for tensor in tensors)
    return capture, Recorded(outputs=outputs, loss=scalar.detach(), closures=stream.closures)
