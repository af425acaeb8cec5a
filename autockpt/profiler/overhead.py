"""What a region costs beside its ops: its call, its replay, and the ops that it keeps."""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import torch
from torch import nn

from autockpt.profiler.timed import EMPTYING_BYTES
from autockpt.regions.checkpointed import checkpointed
from autockpt.regions.guarded import Facts
from autockpt.regions.keeping import keeper, kept

_REGIONS = 4
_KEPT = 8
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
        Nanoseconds: steps of four regions of nine small ops each, eight of them kept, against
        the same ops outside regions, in interleaved pairs; the median difference, a region.

    Notes
    -----
    Between regions the caches of a CPU are emptied, as the ops of a step do it: the Python of
    a region, found in a cache, takes a fraction of what it takes otherwise.
    """
    x = torch.ones(8, device=device_type, requires_grad=True)
    room = torch.empty(EMPTYING_BYTES if device_type == "cpu" else 0, dtype=torch.uint8)
    differences = []
    for _ in range(_PAIRS):
        plain = _step(x, room, regions=False)
        differences.append(_step(x, room, regions=True) - plain)
    return max(0, round(statistics.median(differences) / _REGIONS))


def _region(module: nn.Module, keep: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x)
    for number in range(_KEPT):
        y = kept(keep, number, functools.partial(torch.tanh, y), y)
    return y


_region.facts = Facts(  # type: ignore[attr-defined]
    name="region", place="", reads=(), read=lambda _: (), writes_statistics=False
)


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


def _step(x: torch.Tensor, room: torch.Tensor, *, regions: bool) -> int:
    emptied: Any = _Emptied.apply
    module = nn.Identity()
    _wait(x.device)
    start = time.perf_counter_ns()
    with torch.enable_grad():
        y = x
        for _ in range(_REGIONS):
            if regions:
                y = checkpointed(_region, module, keeper(), y, draws=False)
            else:
                y = _region(module, None, y)
            y = emptied(y, room)
        torch.autograd.grad(y.sum(), x)
    _wait(x.device)
    return time.perf_counter_ns() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
