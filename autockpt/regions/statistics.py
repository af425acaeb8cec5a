"""Running statistics in regions: moved once in forward, never again on recomputation.

A region runs twice. An op in it that writes a running statistic (batch norm) writes the live
buffer the first time and a throw-away clone the second time: same output to the bit, same
number of saved tensors, and the statistic has moved once.
"""

from __future__ import annotations

import threading

import torch

# Per thread: on a GPU, backward and with it the recomputation runs in a thread of its own.
_local = threading.local()


class Replay:
    """While one is entered, ``statistic`` hands out clones in this thread."""

    @staticmethod
    def enter() -> None:
        """Begin, inside those that have begun."""
        _local.depth = getattr(_local, "depth", 0) + 1

    @staticmethod
    def leave() -> None:
        """End the one begun last."""
        _local.depth -= 1


def statistic(buffer: torch.Tensor) -> torch.Tensor:
    """Give ``buffer`` in forward, a clone of it on recomputation.

    Examples
    --------
    >>> mean = torch.zeros(2)
    >>> statistic(mean) is mean
    True
    >>> Replay.enter()
    >>> statistic(mean) is mean
    False
    >>> Replay.leave()
    """
    if torch.compiler.is_compiling() or getattr(_local, "depth", 0) == 0:
        return buffer
    return buffer.detach().clone()
