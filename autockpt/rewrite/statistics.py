"""Running statistics in regions: moved once in forward, never again on recomputation.

A region runs twice. An op in it that writes a running statistic (batch norm) writes the live
buffer the first time and a throw-away clone the second time: same output to the bit, same
number of saved tensors, and the statistic has moved once.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch

__all__ = ["once", "statistic"]

# Per thread: on a GPU, backward and with it the recomputation runs in a thread of its own.
_local = threading.local()


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


def once() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Give the contexts of forward and recomputation: the ``context_fn`` of a region."""
    return nullcontext(), _Recomputing()


def statistic(buffer: torch.Tensor) -> torch.Tensor:
    """Give ``buffer`` in forward, a clone of it on recomputation.

    Examples
    --------
    >>> mean = torch.zeros(2)
    >>> statistic(mean) is mean
    True
    >>> _, recomputation = once()
    >>> with recomputation:
    ...     statistic(mean) is mean
    False
    """
    if getattr(_local, "depth", 0) > 0:
        return buffer.detach().clone()
    return buffer
