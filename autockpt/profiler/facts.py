"""What the profile knows of each op, relative to the op's own arguments and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import fx


class Ref(NamedTuple):
    """A storage as one op sees it: of an argument, of a result, or one that no value shows."""

    kind: Literal["argument", "result", "hidden"]
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One tensor that an op returns, or that it writes in place without returning it.

    ``storage`` is ``("result", own index)`` for a fresh allocation, else the argument or the
    earlier result whose storage it shares. ``same_as`` is the argument that it is, object for
    object, where the op hands one on unchanged (``contiguous()`` of what is contiguous).
    ``written`` is the argument that it is the new content of, ``returned`` whether the call
    returned it.
    """

    storage: Ref
    storage_bytes: int
    gradient_bytes: int
    same_as: int | None = None
    written: int | None = None
    returned: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentGradient:
    """The gradient that an op's backward gives to one argument.

    ``source``: ``("result", k)``, the storage of the gradient of result ``k`` handed on, or
    ``("hidden", k)``, the k-th fresh storage that backward allocates. ``strides`` is how it lies,
    0 where a dimension has one element; None of what is not strided.
    """

    argument: int
    source: Ref
    dense: bool
    view: bool
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFacts:
    """Everything measured on one distinct op. Arguments are numbered in order of appearance.

    ``number_bytes`` are those of Python numbers that autograd saves, out of sight of all hooks.
    ``cached`` are the hidden storages that autocast keeps: casts of weights. ``context`` are the
    storages that a custom Function keeps as attributes: they live as long as its node.
    Bytes are exact, costs are integer ns of the chosen cost, FLOPs are raw.
    """

    results: tuple[Result, ...] = ()
    hidden_bytes: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()
    saved: tuple[Ref, ...] = ()
    packs: bool = False
    forward_workspace_bytes: int = 0
    dropped_workspace_bytes: int | None = None
    backward_workspace_bytes: int = 0
    backward_workspace_alone_bytes: int | None = None
    early_backward_bytes: int = 0
    early_backward_alone_bytes: int | None = None
    stop_peak_bytes: int = 0
    fresh_gradient_bytes: tuple[int, ...] = ()
    gradients: tuple[ArgumentGradient, ...] = ()
    cost: int = 0
    stop_cost: int = 0
    backward_cost: int = 0
    flops: int = 0
    stop_flops: int = 0
    backward_flops: int = 0
    random: bool = False
    context: tuple[Ref, ...] = ()
    asks_again: bool = False
    number_bytes: int = 0
    packs_unfilled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """A tensor that is there before the step: identity, storage and bytes.

    ``tensor`` and ``storage`` are small integers, equal for the same object and for the same
    allocation (tied weights, views of one buffer).
    """

    tensor: int
    storage: int
    storage_bytes: int
    gradient_bytes: int
    kind: Literal["parameter", "buffer", "attribute", "batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Facts per op node, and the tensors that were there before.

    Attributes
    ----------
    facts : dict
        From op node to its facts. Nodes of one distinct op share one object.
    externals : dict
        From placeholder and get_attr node to its External.
    unpacked : dict
        From a node that takes one tensor out of a call's several results to that call's node
        and the number of the tensor among its results.
    gradient_forms : dict or None
        How gradients lie in memory, sizes aside; see ``forms.Forms``. None if that depends on
        the sizes.
    parameter_bytes, buffer_bytes, batch_bytes, gradient_bytes : int
        Fixed bytes, counted per storage.
    distinct_ops : int
        How many ops were run apart.
    region_cost : int
        What a region costs beside its ops; 0 unless costs are measured times.
    """

    facts: dict[fx.Node, OpFacts]
    externals: dict[fx.Node, External]
    unpacked: dict[fx.Node, tuple[fx.Node, int]]
    gradient_forms: dict[int, Any] | None
    parameter_bytes: int
    buffer_bytes: int
    batch_bytes: int
    gradient_bytes: int
    distinct_ops: int
    region_cost: int = 0
    device_type: str
