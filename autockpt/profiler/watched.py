"""Bare runs of an op: the allocator watched, or the clock.

A dispatch mode changes what autograd does in place, so none is active here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds of a forward, of a forward up to its last pack, and of a backward."""

    forward: int = 0
    stop: int = 0
    backward: int = 0


def timed_runs(subject: Subject, differentiable: list[int]) -> Times:
    """Least times of a few runs; backward without the seed."""
    runs = [_timed_run(subject, differentiable) for _ in range(_TIMED_RUNS)]
    return Times(
        forward=min(run.forward for run in runs),
        stop=min(_time_to_stop(subject) for _ in runs),
        backward=min(run.backward for run in runs),
    )


def _timed_run(subject: Subject, differentiable: list[int]) -> Times:
    leaves, args, kwargs, edges = subject.stand_ins()
    clock = _Clock(subject.tensors)
    out = subject.call(*args, **kwargs)
    forward = clock.ns()
    wanted = [edge for edge in edges if edge is not None]
    if not differentiable or not wanted:
        return Times(forward=forward)
    results, _ = results_of(subject, leaves, out)
    clocks: list[_Clock] = []
    end = rest(subject, results, differentiable, lambda _: clocks.append(_Clock(subject.tensors)))
    differentiate(end, wanted)
    return Times(forward=forward, backward=clocks[0].ns())


def _time_to_stop(subject: Subject) -> int:
    """Time a forward up to its last pack, where a recomputation that ends in it ends."""
    _, args, kwargs, _ = subject.stand_ins()
    clock = _Clock(subject.tensors)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        clock.lap()
        return tensor.detach()

    with saved_tensors_hooks(pack, as_it_is):
        subject.call(*args, **kwargs)
    torch.clear_autocast_cache()
    return clock.last_lap_ns()


class _Clock:
    """Wall clock on a CPU, events on a GPU."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._cuda = any(tensor.is_cuda for tensor in tensors)
        self._lap: float | torch.cuda.Event | None = None
        if self._cuda:
            self._start = self._event()
        self._wall = time.perf_counter_ns()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self) -> None:
        """Note the time; the last one counts."""
        self._lap = self._event() if self._cuda else time.perf_counter_ns()

    def last_lap_ns(self) -> int:
        """Nanoseconds from when the clock was made to the last lap; 0 without one."""
        if self._lap is None:
            return 0
        if isinstance(self._lap, torch.cuda.Event):
            self._lap.synchronize()
            return round(float(self._start.elapsed_time(self._lap)) * 1e6)
        return int(self._lap) - self._wall

    def ns(self) -> int:
        """Nanoseconds since the clock was made."""
        self.lap()
        return self.last_lap_ns()
