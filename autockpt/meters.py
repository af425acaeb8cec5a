"""Peak bytes as the allocator saw them: one interface, one implementation a device kind."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from autockpt.errors import ProfileError

_MARK = "autockpt.mark."


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What the allocator did between two marks, relative to the level at the first.

    Attributes
    ----------
    peak_bytes : int
        Highest level reached (at least 0).
    end_bytes : int
        Level at the second mark.
    """

    peak_bytes: int
    end_bytes: int


class Meter(Protocol):
    """Sees every allocation and release of one device while it is open."""

    def __enter__(self) -> Meter: ...
    def __exit__(self, *exc: object) -> None: ...

    def mark(self, name: str) -> None:
        """Note an instant. Names are unique within one meter."""

    def span(self, start: str, stop: str) -> Span:
        """Peak and end level between two marks (after the meter is closed)."""


@contextmanager
def _banner_off() -> Iterator[None]:
    """Keep the profiler, which reads this once, from writing lines to stderr at every use."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        del os.environ[name]


class CpuMeter:
    """Replays the memory events of ``torch.profiler``: exact, the same in every run."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._levels: dict[str, int] = {}
        self._deltas: list[int] = []

    def __enter__(self) -> CpuMeter:
        if torch.autograd.profiler._is_profiler_enabled:
            raise ProfileError(
                "A torch profiler is running, and the exact CPU memory meter needs it for "
                "itself. Plan or measure before the profiler is started."
            )
        with _banner_off():
            self._profile.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._profile.__exit__(None, None, None)
        results = self._profile.profiler
        assert results is not None
        assert results.kineto_results is not None
        events = [
            (event.start_ns(), event)
            for event in results.kineto_results.events()
            if event.name() == "[memory]" or event.name().startswith(_MARK)
        ]
        events.sort(key=lambda pair: pair[0])
        for _, event in events:
            if event.name() != "[memory]":
                self._levels[event.name().removeprefix(_MARK)] = len(self._deltas)
            elif event.device_type() == DeviceType.CPU:
                self._deltas.append(event.nbytes())  # type: ignore[attr-defined]

    def mark(self, name: str) -> None:
        """Note an instant."""
        with record_function(_MARK + name):
            pass

    def span(self, start: str, stop: str) -> Span:
        """Peak and end level between two marks."""
        deltas = self._deltas[self._levels[start] : self._levels[stop]]
        levels = [0, *itertools.accumulate(deltas)]
        return Span(peak_bytes=max(levels), end_bytes=levels[-1])

    def levels(self, start: str, stop: str) -> tuple[int, ...]:
        """Level after each allocation and release between two marks."""
        deltas = self._deltas[self._levels[start] : self._levels[stop]]
        return tuple(itertools.accumulate(deltas))


class CudaMeter:
    """Allocator statistics: bytes that were requested, before rounding and splitting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._current = 0
        self._marks: dict[str, tuple[int, int]] = {}
        self._order: list[str] = []

    def __enter__(self) -> CudaMeter:
        torch.cuda.synchronize(self._device)
        return self

    def __exit__(self, *exc: object) -> None:
        torch.cuda.synchronize(self._device)

    def mark(self, name: str) -> None:
        """Note an instant."""
        stats = torch.cuda.memory_stats(self._device)
        self._marks[name] = (
            stats["requested_bytes.all.current"],
            stats["requested_bytes.all.peak"],
        )
        self._order.append(name)
        torch.cuda.reset_peak_memory_stats(self._device)

    def span(self, start: str, stop: str) -> Span:
        """Peak and end level between two marks."""
        first, last = self._order.index(start), self._order.index(stop)
        base = self._marks[start][0]
        peaks = [self._marks[name][1] for name in self._order[first + 1 : last + 1]]
        return Span(
            peak_bytes=max([0, *(peak - base for peak in peaks)]),
            end_bytes=self._marks[stop][0] - base,
        )


class NullMeter:
    """For devices that hold no bytes (``meta``): every span is empty."""

    def __enter__(self) -> NullMeter:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def mark(self, name: str) -> None:
        """Note an instant."""

    def span(self, start: str, stop: str) -> Span:
        """Peak and end level between two marks."""
        return Span(peak_bytes=0, end_bytes=0)


def meter(device: torch.device) -> Meter:
    """Return a new meter for a device.

    Raises
    ------
    ProfileError
        For a device kind whose allocator cannot be watched.
    """
    if device.type == "cpu":
        return CpuMeter()
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "meta":
        return NullMeter()
    raise ProfileError(
        f"The allocator of device '{device}' cannot be watched: autockpt measures on cpu and "
        f"cuda, and plans on meta."
    )


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep the garbage collector off.

    Cycles that are older than what is measured, freed inside it, would move its level. On a GPU
    what they hold may be in the way of what is measured: there they are collected first.

    Examples
    --------
    >>> with collector_off(), meter(torch.device("cpu")) as watch:
    ...     watch.mark("start")
    ...     zeros = torch.zeros(1024)
    ...     watch.mark("stop")
    >>> watch.span("start", "stop").peak_bytes
    4096
    """
    if torch.cuda.is_initialized():
        gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
