"""Local search under the judge: small changes that make a plan cheaper and still fit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Self

from solvers.keeping import keeps_in_step
from solvers.plan import Region
from solvers.replay import Replay

_STEPS = (1, 2, 3)


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

    Deterministic: takes the first change that helps and goes on from where it was. Edges move,
    regions go, meet or split, and if ``keeping`` keep an op more or less. Regions with regions
    inside stay as they are.
    """
    while True:
        for change in _changes(replay, regions, keeping=keeping):
            if prices <= 0 or deadline.over():
                return regions
            prices -= 1
            # The cost is soon known: most changes fail on it.
            if change.dearer(replay, regions) >= 0:
                continue
            changed = change.made(regions)
            if replay.price(changed)[0] <= budget_bytes:
                regions = changed
                break
        else:
            return regions


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
    peak, cost = replay.price(regions)
    while peak > budget_bytes:
        if below is not None and cost >= below:
            return None
        best: tuple[float, int, tuple[Region, ...]] | None = None
        changes = [(change.dearer(replay, regions), change) for change in _changes(replay, regions)]
        prices -= len(changes)
        for dearer, change in sorted(changes, key=itemgetter(0)):
            # No change gains more than all that is missing.
            if best is not None and max(0, dearer) > max(0.0, best[0]) * (peak - budget_bytes):
                break
            changed = change.made(regions)
            new_peak, _ = replay.price(changed)
            gained = peak - max(new_peak, budget_bytes)
            if gained <= 0:
                continue
            rate = dearer / gained
            if best is None or (rate, new_peak) < best[:2]:
                best = rate, new_peak, changed
        if best is None or prices <= 0:
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


@dataclass(frozen=True, slots=True)
class _Change:
    """Other regions in place of ``count`` of them from the ``first`` on."""

    first: int
    count: int
    others: tuple[Region, ...] = ()

    def dearer(self, replay: Replay, regions: tuple[Region, ...]) -> int:
        """Return by how much the recompute cost rises."""
        gone = regions[self.first : self.first + self.count]
        rise = sum(replay.profile(region).cost for region in self.others)
        return rise - sum(replay.profile(region).cost for region in gone)

    def made(self, regions: tuple[Region, ...]) -> tuple[Region, ...]:
        """Return the regions after it."""
        return (*regions[: self.first], *self.others, *regions[self.first + self.count :])


def _changes(
    replay: Replay, regions: tuple[Region, ...], *, keeping: bool = False
) -> Iterator[_Change]:
    """Yield the ways to neighbouring plans, those of the costliest regions first."""
    order = sorted(range(len(regions)), key=lambda k: -replay.profile(regions[k]).cost)
    for k in order:
        if regions[k].children:
            continue
        low = regions[k - 1].stop if k else 0
        high = regions[k + 1].start if k + 1 < len(regions) else len(replay.problem.ops)
        yield _Change(k, 1)
        for region in _moved(replay, regions[k], low, high):
            yield _Change(k, 1, (region,))
            kept = tuple(i for i in regions[k].kept if region.start <= i < region.stop)
            same = replace(region, kept=kept)
            if keeping and kept and keeps_in_step(same, replay.problem):
                yield _Change(k, 1, (same,))
        if keeping:
            yield from (_Change(k, 1, (region,)) for region in _keeping(replay, regions[k]))
        yield from _joints(replay, regions, k)


def _moved(replay: Replay, region: Region, low: int, high: int) -> Iterator[Region]:
    for step in (*_STEPS, *(-step for step in _STEPS)):
        start, stop = region.start + step, region.stop + step
        if low <= start < region.stop and _allowed(replay, start, region.stop):
            yield Region(start=start, stop=region.stop)
        if region.start < stop <= high and _allowed(replay, region.start, stop):
            yield Region(start=region.start, stop=stop)


def _keeping(replay: Replay, region: Region) -> Iterator[Region]:
    """Yield the region with one op more that it keeps, or one less."""
    if region.children:
        return
    inside = range(region.start, region.stop)
    # All of them or none, see ``keeps_in_step``.
    draws = {i for i in inside if replay.problem.ops[i].random}
    for together in (draws, *({i} for i in inside if i not in draws)):
        if together and together <= replay.keepable:
            kept = set(region.kept) ^ together
            yield replace(region, kept=tuple(sorted(kept)))


def _joints(replay: Replay, regions: tuple[Region, ...], k: int) -> Iterator[_Change]:
    """Yield moves of the joint of two touching regions, and splits of a region in two."""
    region, after = regions[k], regions[k + 1 :]
    if after and after[0].start == region.stop and not after[0].children:
        for step in (*_STEPS, *(-step for step in _STEPS)):
            joint = region.stop + step
            if region.start < joint < after[0].stop and replay.problem.boundaries[joint]:
                left = Region(start=region.start, stop=joint)
                yield _Change(k, 2, (left, Region(start=joint, stop=after[0].stop)))
    packing = [
        i + 1
        for i in range(region.start, region.stop - 1)
        if replay.graph.packs[i] and replay.problem.boundaries[i + 1]
    ]
    for joint in packing:
        left = Region(start=region.start, stop=joint)
        yield _Change(k, 1, (left, Region(start=joint, stop=region.stop)))


def _allowed(replay: Replay, start: int, stop: int) -> bool:
    problem = replay.problem
    edges = problem.boundaries[start] and problem.boundaries[stop]
    return edges and not any(op.pinned for op in problem.ops[start:stop])
