"""What a region costs beside its ops: the call under ``checkpoint``, and starting its replay."""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from autockpt.profiler.timed import EMPTYING_BYTES

_REGIONS = 4
_PAIRS = 9


@functools.cache
def region_ns(device_type: str) -> int:
    """Measure the time that a region adds to a step, once per kind of device.

    Parameters
    ----------
    device_type : str

    Returns
    -------
    int
        Nanoseconds: steps of four regions of one small op each against the same ops outside
        regions, in interleaved pairs; the median difference, a region.

    Notes
    -----
    Between regions the caches of a CPU are emptied, as the ops of a step do it: the Python of
    ``checkpoint``, found in a cache, takes a sixth of what it takes otherwise.
    """
    x = torch.ones(8, device=device_type, requires_grad=True)
    room = torch.empty(EMPTYING_BYTES if device_type == "cpu" else 0, dtype=torch.uint8)
    differences = []
    for _ in range(_PAIRS):
        plain = _step(x, room, {})
        differences.append(
            _step(x, room, {"use_reentrant": False, "preserve_rng_state": False}) - plain
        )
    return max(0, round(statistics.median(differences) / _REGIONS))


class _Emptied(torch.autograd.Function):
    """Nothing but other bytes in the caches, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        ctx.room = room
        room.fill_(1)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.room.fill_(1)
        return gradients[0], None


def _step(x: torch.Tensor, room: torch.Tensor, regions: dict[str, Any]) -> int:
    emptied: Any = _Emptied.apply
    _wait(x.device)
    start = time.perf_counter_ns()
    with torch.enable_grad():
        y = x
        for _ in range(_REGIONS):
            y = checkpoint(torch.tanh, y, **regions) if regions else torch.tanh(y)
            y = emptied(y, room)
        torch.autograd.grad(y.sum(), x)
    _wait(x.device)
    return time.perf_counter_ns() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
