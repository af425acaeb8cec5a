"""Bare runs of an op against the clock.

Run again and again, an op finds all that it reads and writes in a cache, where in a step it does
not: what moves memory would look too cheap beside what computes. So the caches of a CPU are emptied
before each run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from autockpt.profiler.subject import Subject, as_it_is, differentiate, rest, results_of

_RUNS = 3
# Written to before each run; as large as the last cache of common CPUs.
EMPTYING_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds of a forward, of a forward up to its last pack, and of a backward."""

    forward: int = 0
    stop: int = 0
    backward: int = 0


class Timer:
    """Times ops of a step on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._emptying: torch.Tensor | None = None
        if device.type == "cpu":
            self._emptying = torch.empty(EMPTYING_BYTES, dtype=torch.uint8)

    def times(self, subject: Subject, differentiable: list[int], *, stops_inside: bool) -> Times:
        """Return the least times of a few runs.

        Parameters
        ----------
        subject : Subject
        differentiable : list of int
            Its results that gradients flow to.
        stops_inside : bool
            Whether a recomputation that ends in this op has to begin it.
        """
        runs = [self._run(subject, differentiable) for _ in range(_RUNS)]
        stops = [self._stop(subject) for _ in range(_RUNS if stops_inside else 0)]
        return Times(
            forward=min(run.forward for run in runs),
            stop=min(stops, default=0),
            backward=min(run.backward for run in runs),
        )

    def _clock(self) -> _Clock:
        if self._emptying is not None:
            self._emptying.fill_(1)
        return _Clock(self._device)

    def _run(self, subject: Subject, differentiable: list[int]) -> Times:
        """Time forward, and backward without the seed."""
        leaves, args, kwargs, edges = subject.stand_ins()
        clock = self._clock()
        out = subject.call(*args, **kwargs)
        forward = clock.ns()
        wanted = [edge for edge in edges if edge is not None]
        if not differentiable or not wanted:
            return Times(forward=forward)
        results, _ = results_of(subject, leaves, out)
        clocks: list[_Clock] = []
        end = rest(subject, results, differentiable, lambda _: clocks.append(self._clock()))
        differentiate(end, wanted)
        return Times(forward=forward, backward=clocks[0].ns())

    def _stop(self, subject: Subject) -> int:
        _, args, kwargs, _ = subject.stand_ins()
        clock = self._clock()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            clock.lap()
            return tensor.detach()

        with saved_tensors_hooks(pack, as_it_is):
            subject.call(*args, **kwargs)
        torch.clear_autocast_cache()
        return clock.last_lap_ns()


class _Clock:
    """Wall clock on a CPU, events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._lap: int | torch.cuda.Event | None = None
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
        if isinstance(self._lap, int):
            return self._lap - self._wall
        self._lap.synchronize()
        return round(float(self._start.elapsed_time(self._lap)) * 1e6)

    def ns(self) -> int:
        """Nanoseconds since the clock was made."""
        self.lap()
        return self.last_lap_ns()
