"""Counts what an op dispatches to: FLOPs, bytes written, random draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autockpt.profiler.tensors import overlap

_ATEN = torch.ops.aten
# Arguments whose zero (or False) switches a random op's draws off.
_SWITCHES = ("dropout_p", "p", "dropout", "train", "training")


@dataclass(slots=True)
class Tally:
    """Running sums over ATen calls; views are not counted as calls."""

    flops: int = 0
    nbytes: int = 0
    calls: int = 0

    def copy(self) -> Tally:
        """The sums so far."""
        return Tally(self.flops, self.nbytes, self.calls)


class AtenLog(TorchDispatchMode):
    """Sums up the ATen calls below an op, forward or backward.

    Attributes
    ----------
    tally : Tally
    random : bool
        Whether a call drew from a default generator.
    casts : list of (Tensor, Tensor)
        Copies in another dtype, source and result, as autocast makes them.
    packed : list of Tensor
        What autograd has packed so far, as the hook that packs it says.
    filled : list of Tensor
        Those of them that a call wrote afterwards: a recomputation that stops when the last
        tensor is packed would leave it without its content.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tally = Tally()
        self.random = False
        self.casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.packed: list[torch.Tensor] = []
        self.filled: list[torch.Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.packed and func._schema.is_mutable:
            written = list(_written(func, args, kwargs))
            self.filled += [t for t in self.packed if any(overlap(t, w) for w in written)]
        if _draws(func, args, kwargs):
            self.random = True
        if func is _ATEN._to_copy.default:
            self.casts.append((args[0], out))
        if not func.is_view:
            self.tally.calls += 1
            self.tally.nbytes += sum(
                leaf.numel() * leaf.element_size()
                for leaf in pytree.tree_leaves(out)
                if isinstance(leaf, torch.Tensor)
            )
        self.tally.flops += flops_of(func, args, kwargs, out)
        return out


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if not (argument.is_write and isinstance(value, torch.Tensor)):
            continue
        if value.layout is torch.strided:
            yield value


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    # The tag says that the op may draw (attention has it whatever dropout_p is).
    for position, argument in enumerate(func._schema.arguments):
        if argument.name not in _SWITCHES:
            continue
        value = kwargs.get(argument.name, argument.default_value)
        if position < len(args):
            value = args[position]
        if value is not None and not isinstance(value, torch.Tensor) and not value:
            return False
    return True


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of one ATen call: torch's counter, and our own formula for CPU attention."""
    packet = func.overloadpacket
    own = _ATTENTION.get(packet)
    if own is not None:
        return own(args)
    count = flop_registry.get(packet)
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    # Two matrix products, q @ k^T and p @ v, each 2 multiply-adds an element of the scores.
    *batch, rows, width = query.shape
    scores = rows * key.shape[-2]
    for size in batch:
        scores *= size
    return 2 * scores * (width + value.shape[-1])


def _forward(args: tuple[Any, ...]) -> int:
    return _attention_flops(args[0], args[1], args[2])


def _backward(args: tuple[Any, ...]) -> int:
    # Five products of the same sizes where forward has two: scores again, dv, dp, dq, dk.
    return _attention_flops(args[1], args[2], args[3]) * 5 // 2


_ATTENTION: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _forward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}
