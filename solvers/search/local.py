"""Local search under the judge: small changes that make a plan cheaper and still fit."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Self

from solvers.judge.replay import Replay
from solvers.plan import Region
from solvers.search.moves import changes

# How many of the changes that nearly fit are followed.
_FOLLOWED = 5


@dataclass(frozen=True, slots=True)
class Deadline:
    """When to stop searching; ``None`` is never."""

    at: float | None = None

    @classmethod
    def after(cls, seconds: float | None) -> Self:
        """Return the deadline so many seconds from now."""
        return cls(None if seconds is None else time.perf_counter() + seconds)

    def left(self) -> float | None:
        """Return the seconds that are left, not below 0; ``None`` without end."""
        return None if self.at is None else max(0.0, self.at - time.perf_counter())

    def over(self) -> bool:
        """Tell whether it has passed."""
        return self.at is not None and time.perf_counter() >= self.at


WITHOUT_END = Deadline()


@dataclass(slots=True)
class _Judge:
    """The judge, who may be asked only so often."""

    replay: Replay
    left: int
    deadline: Deadline = WITHOUT_END

    def peak(self, regions: tuple[Region, ...]) -> int:
        self.left -= 1
        return self.replay.price(regions)[0]

    def over(self) -> bool:
        return self.left <= 0 or self.deadline.over()


def improve(
    replay: Replay,
    regions: tuple[Region, ...],
    budget_bytes: int,
    prices: int,
    deadline: Deadline = WITHOUT_END,
    *,
    keeping: bool = False,
) -> tuple[Region, ...]:
    """Return regions that fit and cost no more, after at most ``prices`` calls of the judge.

    Deterministic: takes the first of the ``changes`` that helps and goes on from where it was.
    """
    judge = _Judge(replay, prices, deadline)
    while True:
        for change in changes(replay, regions, keeping=keeping):
            if judge.over():
                return regions
            # The cost is soon known: most changes fail on it.
            if change.dearer(replay, regions) >= 0:
                continue
            changed = change.made(regions)
            if judge.peak(changed) <= budget_bytes:
                regions = changed
                break
        else:
            return regions


def exchanged(
    replay: Replay,
    regions: tuple[Region, ...],
    budget_bytes: int,
    prices: int,
    deadline: Deadline = WITHOUT_END,
) -> tuple[Region, ...]:
    """Return regions that fit and cost no more, by changes that fit only with others.

    A change that saves and does not fit is made, and others after it until the plan fits, as
    long as less is spent on them than it saved. Those that miss fewest bytes for what they save
    are tried first.
    """
    judge = _Judge(replay, prices, deadline)
    while not judge.over():
        better = _exchange(judge, regions, budget_bytes)
        if better is None:
            break
        regions = better
    return regions


def _exchange(
    judge: _Judge, regions: tuple[Region, ...], budget_bytes: int
) -> tuple[Region, ...] | None:
    replay = judge.replay
    tried: list[tuple[float, int, tuple[Region, ...]]] = []
    for change in changes(replay, regions, keeping=True):
        dearer = change.dearer(replay, regions)
        if dearer >= 0:
            continue
        if judge.over():
            return None
        changed = change.made(regions)
        peak = judge.peak(changed)
        if peak <= budget_bytes:
            return changed
        tried.append(((peak - budget_bytes) / -dearer, peak, changed))
    below = replay.price(regions)[1]
    for _, _, changed in sorted(tried, key=itemgetter(0, 1))[:_FOLLOWED]:
        better = _fit(judge, changed, budget_bytes, below, keeping=True)
        if better is not None:
            return better
    return None


def fitted(
    replay: Replay,
    regions: tuple[Region, ...],
    budget_bytes: int,
    prices: int,
    below: int | None = None,
) -> tuple[Region, ...] | None:
    """Return regions changed until they fit, at little cost, or None if that took too long.

    Takes, time after time, the change that costs least per byte by which it brings the peak
    nearer to the budget. None as well as soon as they cost ``below`` or more.
    """
    return _fit(_Judge(replay, prices), regions, budget_bytes, below, keeping=False)


def _fit(
    judge: _Judge,
    regions: tuple[Region, ...],
    budget_bytes: int,
    below: int | None,
    *,
    keeping: bool,
) -> tuple[Region, ...] | None:
    replay = judge.replay
    peak, cost = replay.price(regions)
    while peak > budget_bytes:
        room = None if below is None else below - cost
        if room is not None and room <= 0:
            return None
        best: tuple[float, int, tuple[Region, ...]] | None = None
        ways = changes(replay, regions, keeping=keeping)
        for dearer, change in sorted(
            ((change.dearer(replay, regions), change) for change in ways), key=itemgetter(0)
        ):
            if judge.over() or (room is not None and dearer >= room):
                break
            if keeping and dearer < 0:
                continue
            # No change gains more than all that is missing.
            if best is not None and max(0, dearer) > max(0.0, best[0]) * (peak - budget_bytes):
                break
            changed = change.made(regions)
            new_peak = judge.peak(changed)
            gained = peak - max(new_peak, budget_bytes)
            if gained <= 0:
                continue
            rate = dearer / gained
            if best is None or (rate, new_peak) < best[:2]:
                best = rate, new_peak, changed
        if best is None or judge.over():
            return None
        regions = best[2]
        peak, cost = replay.price(regions)
    return regions


def tidied(replay: Replay, regions: tuple[Region, ...], budget_bytes: int) -> tuple[Region, ...]:
    """Return regions without those that do nothing for the plan, at no more cost.

    A region goes, outer or inner, or two that touch become one, where the plan fits as well
    without, and is no dearer. Linear in the number of regions, in calls of the judge.
    """
    regions = _without_inner(replay, regions, budget_bytes)
    cost = replay.price(regions)[1]
    for change in (_without, _merged):
        k = 0
        while k < len(regions):
            fewer = change(replay, regions, k)
            if fewer is not None:
                new_peak, new_cost = replay.price(fewer)
                if new_peak <= budget_bytes and new_cost <= cost:
                    regions, cost = fewer, new_cost
                    continue
            k += 1
    return regions


def _without_inner(
    replay: Replay, regions: tuple[Region, ...], budget_bytes: int
) -> tuple[Region, ...]:
    cost = replay.price(regions)[1]
    k = 0
    while len(inner := _inner(regions)) > k:
        fewer = _lifted(regions, inner[k])
        new_peak, new_cost = replay.price(fewer)
        if new_peak <= budget_bytes and new_cost <= cost:
            regions, cost = fewer, new_cost
        else:
            k += 1
    return regions


def _inner(regions: tuple[Region, ...]) -> list[Region]:
    return [inner for region in regions for child in region.children for inner in child.walk()]


def _lifted(regions: tuple[Region, ...], gone: Region) -> tuple[Region, ...]:
    """Return regions with the children of one of them in its place."""
    found: list[Region] = []
    for region in regions:
        if region is gone:
            found += region.children
        elif region.start <= gone.start and gone.stop <= region.stop:
            found.append(replace(region, children=_lifted(region.children, gone)))
        else:
            found.append(region)
    return tuple(found)


def _without(replay: Replay, regions: tuple[Region, ...], k: int) -> tuple[Region, ...] | None:
    """Return the regions without the k-th one, its children in its place."""
    return (*regions[:k], *regions[k].children, *regions[k + 1 :])


def _merged(replay: Replay, regions: tuple[Region, ...], k: int) -> tuple[Region, ...] | None:
    """Return the regions with the k-th and the next one as one, if they touch."""
    if k + 1 == len(regions) or regions[k].stop != regions[k + 1].start:
        return None
    first, second = regions[k], regions[k + 1]
    both = Region(start=first.start, stop=second.stop, children=first.children + second.children)
    return (*regions[:k], both, *regions[k + 2 :])
