"""What a capture is: the stream of torch calls of one real forward, as an ``fx.Graph``.

Node kinds of ``Capture.graph``
-------------------------------
``placeholder``
    One tensor leaf of the call's arguments. ``meta["path"]``: where it is found in
    ``(args, kwargs)`` at each call.
``get_attr``
    A tensor read from the live module at each use; the target is its attribute path from the
    root (``transformer.h.0.attn.c_attn.weight``). ``meta["kind"]`` is ``"parameter"``,
    ``"buffer"`` or ``"attribute"`` (a tensor in a plain attribute).
``call_function``, ``call_method``
    A torch call. Arguments are nodes and constants, nested in tuples, lists, dicts, slices.
    A call that returns several tensors is followed at once by ``operator.getitem`` nodes, one
    for each result that is used.
``call_function`` of ``autockpt.capture.guards.expect``
    A guard: ``(kind, node, expected)``. Python asked a tensor for a value, or an argument's
    value was found to matter.
``output``
    ``((model outputs ...), loss)``: the tensor leaves of the model's output in template order,
    then the node of the scalar that is differentiated. Nodes with ``meta["stage"] == "loss"``
    belong to the loss outside the model, and are not part of the emitted forward.

``meta`` of every node that computes: ``module`` (dotted path), ``source`` (``file.py:line`` of
the user's frame), ``ambient`` (an ``Ambient``), ``stage`` (``"model"`` or ``"loss"``),
``draws`` (whether the call moved a default generator of torch when it was recorded),
``tensors`` (a tuple of ``TensorMeta`` of the tensors it returned, nested results flattened in
order), ``writes`` (the tuple of argument nodes whose storage it writes in place),
``wants`` (the tuple of argument nodes whose tensor required grad when it was called),
``calls`` (numbers of the module calls under way, outermost first).
Placeholders and get_attr nodes carry ``tensors`` with one entry too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Layout of a tensor, without the tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    grad_fn: str = ""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """Describe a strided tensor (others have an empty stride)."""
        strided = tensor.layout is torch.strided
        return cls(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()) if strided else (),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
            grad_fn=type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else "",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """One recorded forward (and loss), with what is needed to call it again.

    Attributes
    ----------
    graph : fx.Graph
        See the module docstring. Treated as immutable once captured.
    inputs : object
        ``capture.tree.Inputs``: finds the tensors of the placeholders in ``(args, kwargs)``.
    outputs : object
        ``capture.tree.Template``: builds the model's output object from its tensors; with
        ``left``, the pair of it and the tuple of the values that are left.
    left : tuple of (str, str)
        Attributes in which the forward leaves results, as module path and name.
    calls : tuple of str
        The calls of modules in order, named as in ``Span.name``.
    key : object
        ``capture.key.Key``: what must be unchanged for this capture to be valid.
    ambient : object
        ``capture.ambient.Ambient`` at the call.
    signature : str
        Digest of the stream of calls, shapes aside.
    notes : tuple of str
        Remarks for the report (user checkpoints dissolved, ...).
    writes : tuple of str
        Parameters and plain attributes that the forward writes in place (an embedding with
        ``max_norm``). Buffers that are written are not listed: they are few, and small.
    """

    graph: fx.Graph
    inputs: Any
    outputs: Any
    key: Any
    ambient: Any
    signature: str
    notes: tuple[str, ...] = field(default=())
    writes: tuple[str, ...] = field(default=())
    left: tuple[tuple[str, str], ...] = field(default=())
    calls: tuple[str, ...] = field(default=())
