"""Bare runs of an op: the allocator watched, or the clock.

A dispatch mode changes what autograd does in place, so none is active here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.autograd.graph import saved_tensors_hooks

from autockpt.meters import Meter
from autockpt.profiler.subject import Subject, as_it_is, differentiate, rest, results_of

_TIMED_RUNS = 3


def watched_run(subject: Subject, watch: Meter, differentiable: list[int]) -> bool:
    """Run bare under the meter; say whether a backward was run."""
    leaves, args, kwargs, edges = subject.stand_ins()
    watch.mark(f"{subject.name}.forward")
    out = subject.call(*args, **kwargs)
    watch.mark(f"{subject.name}.forward.end")
    torch.clear_autocast_cache()
    wanted = [edge for edge in edges if edge is not None]
    if not differentiable or not wanted:
        return False
    results, _ = results_of(subject, leaves, out)
    held: list[torch.Tensor] = []

    def arrived(gradients: tuple[torch.Tensor, ...]) -> None:
        # The gradient of a part is let go of before that of the whole is made, unless another
        # op has it too, as here; ``alone_run`` is the other case.
        held.extend(gradients if subject.writes_part else ())
        watch.mark(f"{subject.name}.backward")

    end = rest(subject, results, differentiable, arrived)
    del out, results, leaves, args, kwargs
    got = differentiate(end, wanted)
    watch.mark(f"{subject.name}.backward.end")
    held.clear()
    del got
    return True


def alone_run(subject: Subject, watch: Meter, differentiable: list[int]) -> None:
    """Run backward as where no other op has the gradients that arrive."""
    leaves, args, kwargs, edges = subject.stand_ins()
    out = subject.call(*args, **kwargs)
    torch.clear_autocast_cache()
    results, _ = results_of(subject, leaves, out)
    end = rest(subject, results, differentiable, lambda _: watch.mark(f"{subject.name}.alone"))
    del out, results, leaves, args, kwargs
    got = differentiate(end, [edge for edge in edges if edge is not None])
    watch.mark(f"{subject.name}.alone.end")
    del got


def stopped_run(subject: Subject, watch: Meter) -> int:
    """Run forward, marking each tensor that is packed; return how many there were.

    A recomputation that ends in this op ends at the last mark.
    """
    _, args, kwargs, _ = subject.stand_ins()
    packs = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal packs
        packs += 1
        watch.mark(f"{subject.name}.stop.{packs}")
        return tensor.detach()

    watch.mark(f"{subject.name}.stop")
    with saved_tensors_hooks(pack, as_it_is):
        subject.call(*args, **kwargs)
    torch.clear_autocast_cache()
    return packs


def dropped_run(subject: Subject, watch: Meter) -> None:
    """Run forward as in a region: what is packed is thrown away at once."""
    _, args, kwargs, _ = subject.stand_ins()
    watch.mark(f"{subject.name}.dropped")
    with saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        subject.call(*args, **kwargs)
    watch.mark(f"{subject.name}.dropped.end")
    torch.clear_autocast_cache()


class _Unpacked(Exception):
    """Backward has asked for something saved: there is no more to see."""


def unpacked_run(subject: Subject, watch: Meter, differentiable: list[int]) -> bool:
    """Run backward up to where it first asks for something saved; say whether it does."""
    leaves, args, kwargs, edges = subject.stand_ins()

    def unpack(_: torch.Tensor) -> torch.Tensor:
        watch.mark(f"{subject.name}.unpacked")
        raise _Unpacked

    with saved_tensors_hooks(torch.Tensor.detach, unpack):
        out = subject.call(*args, **kwargs)
    torch.clear_autocast_cache()
    wanted = [edge for edge in edges if edge is not None]
    if not differentiable or not wanted:
        return False
    results, _ = results_of(subject, leaves, out)
    end = rest(subject, results, differentiable, lambda _: watch.mark(f"{subject.name}.early"))
    del out, results, leaves, args, kwargs
    try:
        differentiate(end, wanted)
    except _Unpacked:
        return True
    return False


def timed_runs(subject: Subject, differentiable: list[int]) -> tuple[int, int]:
    """Least time of a few runs, in ns: forward, and backward without the seed."""
    forwards, backwards = [], []
    for _ in range(_TIMED_RUNS):
        leaves, args, kwargs, edges = subject.stand_ins()
        clock = _Clock(subject.tensors)
        out = subject.call(*args, **kwargs)
        forwards.append(clock.ns())
        wanted = [edge for edge in edges if edge is not None]
        if not differentiable or not wanted:
            continue
        results, _ = results_of(subject, leaves, out)
        clocks: list[_Clock] = []
        end = rest(
            subject,
            results,
            differentiable,
            lambda _: clocks.append(_Clock(subject.tensors)),  # noqa: B023
        )
        differentiate(end, wanted)
        backwards.append(clocks[0].ns())
    return min(forwards), min(backwards, default=0)


class _Clock:
    """Wall clock on a CPU, events on a GPU."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._cuda = any(tensor.is_cuda for tensor in tensors)
        if self._cuda:
            self._start = torch.cuda.Event(enable_timing=True)
            self._start.record()
        self._wall = time.perf_counter_ns()

    def ns(self) -> int:
        """Nanoseconds since the clock was made."""
        if not self._cuda:
            return time.perf_counter_ns() - self._wall
        stop = torch.cuda.Event(enable_timing=True)
        stop.record()
        stop.synchronize()
        return round(float(self._start.elapsed_time(stop)) * 1e6)
