"""Values that a region is handed in forward and makes again on recomputation.

A region holds its arguments. What its prologue can make from other arguments it is handed as a
``remade`` callable: the first call gives the value and lets go of it, later ones run the
prologue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["remade", "taken"]


def remade(prologue: Callable[..., Any], *values: torch.Tensor) -> Any:
    """Hand over values that ``taken`` gives once, and then makes by ``prologue``.

    A compiler runs no region twice, it copies ops and decides itself what it holds: there the
    values stay.

    Examples
    --------
    >>> x = torch.ones(2)
    >>> twice = remade(lambda module, x: x * 2, x * 2)
    >>> taken(twice, None, x), taken(twice, None, x + 1)
    (tensor([2., 2.]), tensor([4., 4.]))
    """
    return values if torch.compiler.is_compiling() else _Remade(prologue, values)


def taken(again: Any, *arguments: Any) -> Any:
    """Take what was handed over, or make it of the arguments."""
    if isinstance(again, tuple):
        return again[0] if len(again) == 1 else again
    return again(*arguments)


class _Remade:
    __slots__ = ("_prologue", "_require_grad", "_values")

    def __init__(self, prologue: Callable[..., Any], values: tuple[torch.Tensor, ...]) -> None:
        self._prologue = prologue
        self._values: tuple[torch.Tensor, ...] | None = values
        self._require_grad = [value.requires_grad for value in values]

    def __call__(self, *arguments: Any) -> Any:
        values, self._values = self._values, None
        if values is None:
            values = self._make(arguments)
        return values[0] if len(values) == 1 else values

    def _make(self, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        # Without grad autocast would cache casts of weights that lead to no gradient.
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with torch.no_grad():
                made = self._prologue(*arguments)
        finally:
            torch.set_autocast_cache_enabled(cached)
        return rooted(made if isinstance(made, tuple) else (made,), self._require_grad)


def rooted(values: tuple[torch.Tensor, ...], require_grad: list[bool]) -> tuple[torch.Tensor, ...]:
    """Let values require grad as results do, in the graph of a recomputation."""
    if not any(require_grad):
        return values
    root = torch.empty(0, requires_grad=True)
    found: tuple[torch.Tensor, ...]
    found = _Rooted.apply(root, require_grad, *values)  # type: ignore[no-untyped-call]
    return found


class _Rooted(torch.autograd.Function):
    """Lets values require grad as results, as they did in forward.

    A leaf would be held by the graph of the recomputation to its end.
    """

    @staticmethod
    def forward(
        ctx: Any, root: torch.Tensor, require_grad: list[bool], *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results = tuple(value.detach() for value in values)
        pairs = zip(results, require_grad, strict=True)
        ctx.mark_non_differentiable(*(result for result, needs in pairs if not needs))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("the graph of a recomputation is never differentiated")
