"""What a region costs beside its ops: the call under ``checkpoint``, and starting its replay."""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

_REGIONS = 8
_PAIRS = 15


@functools.cache
def region_ns(device_type: str) -> int:
    """Measure the time that a region adds to a step, once per kind of device.

    Parameters
    ----------
    device_type : str

    Returns
    -------
    int
        Nanoseconds: steps of eight regions of one small op each against the same ops outside
        regions, in interleaved pairs; the median difference, a region.
    """
    x = torch.ones(8, device=device_type, requires_grad=True)
    differences = []
    for _ in range(_PAIRS):
        plain = _step(x, {})
        differences.append(_step(x, {"use_reentrant": False, "preserve_rng_state": False}) - plain)
    return max(0, round(statistics.median(differences) / _REGIONS))


def _step(x: torch.Tensor, regions: dict[str, Any]) -> int:
    _wait(x.device)
    start = time.perf_counter_ns()
    with torch.enable_grad():
        y = x
        for _ in range(_REGIONS):
            y = checkpoint(torch.tanh, y, **regions) if regions else torch.tanh(y)
        torch.autograd.grad(y.sum(), x)
    _wait(x.device)
    return time.perf_counter_ns() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
