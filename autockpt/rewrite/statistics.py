"""Running statistics in regions: moved once in forward, never again on recomputation.

A region runs twice. An op in it that writes a running statistic (batch norm) writes the live
buffer the first time and a throw-away clone the second time: same output to the bit, same
number of saved tensors, and the statistic has moved once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch import fx

__all__ = ["once", "statistic", "written_statistics"]

# Per thread: on a GPU, backward and with it the recomputation runs in a thread of its own.
_local = threading.local()

_Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


class _Recomputing:
    """While entered, ``statistic`` hands out clones in this thread."""

    def __enter__(self) -> None:
        _local.depth = getattr(_local, "depth", 0) + 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _local.depth -= 1


def _contexts() -> _Contexts:
    return nullcontext(), _Recomputing()


def once() -> dict[str, Callable[[], _Contexts]]:
    """Give the arguments of ``checkpoint`` for a region that writes statistics.

    A compiler runs no region twice, it copies ops and writes at the end: nothing to do.
    """
    return {} if torch.compiler.is_compiling() else {"context_fn": _contexts}


def statistic(buffer: torch.Tensor) -> torch.Tensor:
    """Give ``buffer`` in forward, a clone of it on recomputation.

    Examples
    --------
    >>> mean = torch.zeros(2)
    >>> statistic(mean) is mean
    True
    >>> _, recomputation = once()["context_fn"]()
    >>> with recomputation:
    ...     statistic(mean) is mean
    False
    """
    if torch.compiler.is_compiling() or getattr(_local, "depth", 0) == 0:
        return buffer
    return buffer.detach().clone()


def written_statistics(node: fx.Node) -> list[fx.Node]:
    """Give the tensors of the module that an op writes."""
    return [written for written in node.meta.get("writes", ()) if written.op == "get_attr"]
