"""The op that is run apart, and a stand-in for the rest of the model behind it.

The rest of the model is a function whose backward allocates the incoming gradients, so that
autograd owns them as it does in a real step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autockpt.profiler.tensors import distinct, is_dense, tensors_in

Layout = tuple[int, ...] | None
"""Strides of a gradient; None where it lies as its value does."""


@dataclass(slots=True)
class Subject:
    """The op to rehearse: its call, its real arguments, and what the capture says of them.

    ``differentiable`` are the ids of tensor arguments that require grad in the real step;
    ``written`` the ids of those that the op writes in place (it gets copies of these);
    ``external`` the ids of those that are there before the step (parameters, the batch);
    ``layouts`` how the gradients of its results arrive, if not all as their values lie.
    """

    name: str
    target: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    differentiable: frozenset[int]
    written: frozenset[int]
    external: frozenset[int] = frozenset()
    layouts: tuple[Layout, ...] = ()
    tensors: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = distinct(tensors_in((self.args, self.kwargs)))

    @property
    def writes_part(self) -> bool:
        """Whether it writes a part of a tensor in place."""
        written = (t for t in self.tensors if id(t) in self.written)
        return any(written_base(tensor) is not None for tensor in written)

    def stand_ins(self) -> tuple[list[torch.Tensor], tuple[Any, ...], dict[str, Any], list[Any]]:
        """Leaves on the same storages, the arguments made of them, and their gradient edges."""
        leaves: dict[int, torch.Tensor] = {}
        edges: list[Any] = []
        for tensor in self.tensors:
            # What a view is a view of gets the gradient of what is written to it, whole.
            base = written_base(tensor) if id(tensor) in self.written else None
            leaf = (tensor if base is None else base).detach()
            if id(tensor) in self.differentiable:
                leaf.requires_grad_()
            if id(tensor) in self.written:
                leaf = leaf.clone()
            if leaf.requires_grad:
                edges.append(torch.autograd.graph.get_gradient_edge(leaf))
            else:
                edges.append(None)
            if base is not None and tensor.is_contiguous() and tensor.numel() == base.numel():
                leaf = leaf.view(tensor.shape)
            elif base is not None:
                leaf = leaf.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            leaves[id(tensor)] = leaf
        swap = lambda leaf: leaves[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        args, kwargs = pytree.tree_map(swap, (self.args, self.kwargs))
        return list(leaves.values()), args, kwargs, edges


def written_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a view is one of, where that fills its storage.

    Autograd then copies the whole gradient of the base, and the result of a linear on three
    dimensions is such a view.
    """
    base = tensor._base
    if base is None or tensor.layout is not torch.strided or not is_dense(base):
        return None
    return base if base.numel() * base.itemsize == base.untyped_storage().nbytes() else None


def results_of(
    subject: Subject, leaves: Sequence[torch.Tensor], out: Any
) -> tuple[list[torch.Tensor], int]:
    """What an op returns, then what it wrote in place and did not return; how many it returned."""
    results = tensors_in(out)
    returned = {id(result) for result in results}
    unreturned = [
        leaf
        for leaf, tensor in zip(leaves, subject.tensors, strict=True)
        if id(tensor) in subject.written and id(leaf) not in returned
    ]
    return results + unreturned, len(results)


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Unpack what was packed detached: a result that its own graph holds is never let go."""
    return tensor


class _Rest(torch.autograd.Function):
    """The rest of the model: its backward allocates the gradients that reach the op."""

    @staticmethod
    def forward(
        ctx: Any,
        arrived: Callable[[tuple[torch.Tensor, ...]], None],
        layouts: Sequence[Layout],
        *results: Any,
    ) -> Any:
        ctx.arrived = arrived
        ctx.layouts = [
            (tuple(r.shape), layout or (r.stride() if is_dense(r) else None), r.dtype, r.device)
            for r, layout in zip(results, layouts, strict=True)
        ]
        return torch.zeros((), device=results[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients = tuple(_ones(*layout) for layout in ctx.layouts)
        ctx.arrived(gradients)
        return (None, None, *gradients)


def _ones(
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    if stride is None or 0 in shape:
        return torch.ones(shape, dtype=dtype, device=device)
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return torch.ones(reach, dtype=dtype, device=device).as_strided(shape, stride)


def rest(
    subject: Subject,
    results: Sequence[torch.Tensor],
    differentiable: Sequence[int],
    arrived: Callable[[tuple[torch.Tensor, ...]], object],
) -> torch.Tensor:
    """A scalar behind an op's results; ``arrived`` is called with their gradients."""
    layouts = [subject.layouts[i] if subject.layouts else None for i in differentiable]
    end: torch.Tensor = _Rest.apply(  # type: ignore[no-untyped-call]
        arrived, layouts, *(results[i] for i in differentiable)
    )
    return end


@contextmanager
def outside_autocast(device_type: str) -> Iterator[None]:
    """As a real step runs backward: after the autocast block around its forward."""
    with ExitStack() as stack:
        for kind in {"cpu", device_type}:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def differentiate(end: torch.Tensor, wanted: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
    """Gradients of what is wanted, taken as after an autocast block."""
    with outside_autocast(end.device.type):
        found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(end, wanted, allow_unused=True)
    return found
