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
    return tuple(
        _result(value) if requires else value.detach()
        for value, requires in zip(values, require_grad, strict=True)
    )


def _result(value: torch.Tensor) -> torch.Tensor:
    # A leaf would be held to the end of the recomputation by the node that makes it one. This is
    # the result of a node that saves nothing, that fails if it is differentiated, which nobody
    # does, and that is made in C++: a function in Python takes five times as long.
    node: Any = torch._C._functions.DelayedError(b"a recomputation has no backward", 2)
    result: torch.Tensor = node(_ROOT, value)[1]
    return result


_ROOT = torch.empty(0, device="cpu", requires_grad=True)
