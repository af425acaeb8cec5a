"""Ways from a plan to its neighbours: what local search tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from solvers.judge.keeping import keeps_in_step
from solvers.judge.prologue import unmade_views
from solvers.judge.replay import Replay
from solvers.plan import Region
from solvers.search.keeping_search import worth_keeping
from solvers.search.slices import slices_of

_STEPS = (1, 2, 3)
# What a region keeps of what it takes in: as much as pays at these rates.
_RATES = (0.125, 1.0, 4.0)
# New regions are short, as edges move on by themselves. In larger problems there are so many
# places for one that other changes come too short.
_NEW_OPS = 4
_NEW_REGIONS_OPS = 300


@dataclass(frozen=True, slots=True)
class Change:
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


def changes(
    replay: Replay, regions: tuple[Region, ...], *, keeping: bool = False
) -> Iterator[Change]:
    """Yield the ways to neighbouring plans, those of the costliest regions first.

    Edges move, regions go, meet or split; if ``keeping``, they also grow over what lies between
    them, and keep an op more or less. Regions with regions inside stay as they are. Last come
    regions where there is none, in problems of at most 300 ops.
    """
    order = sorted(range(len(regions)), key=lambda k: -replay.profile(regions[k]).cost)
    for k in order:
        if regions[k].children:
            continue
        low = regions[k - 1].stop if k else 0
        high = regions[k + 1].start if k + 1 < len(regions) else len(replay.problem.ops)
        yield Change(k, 1)
        for region in _moved(replay, regions[k], low, high):
            yield Change(k, 1, (region,))
            same = _carried(regions[k], region)
            if keeping and same != region and keeps_in_step(same, replay.problem):
                yield Change(k, 1, (same,))
        if keeping:
            yield from (Change(k, 1, (region,)) for region in _prologued(replay, regions[k]))
            yield from (Change(k, 1, (region,)) for region in _keeping(replay, regions[k]))
            yield from _grown(replay, regions, k, low, high)
        yield from _joints(replay, regions, k)
    if len(replay.problem.ops) <= _NEW_REGIONS_OPS:
        yield from _added(replay, regions)


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


def _carried(old: Region, new: Region) -> Region:
    """Return a region with other edges that keeps and makes again what it did, as far as it can."""
    kept = tuple(i for i in old.kept if new.start <= i < new.stop)
    prologue = old.prologue if not old.prologue or old.prologue[-1] < new.start else ()
    return replace(new, kept=kept, prologue=prologue)


def _prologued(replay: Replay, region: Region) -> Iterator[Region]:
    """Yield the region making one input more again, or one less."""
    problem = replay.problem
    slices = slices_of(replay)
    read = {s for i in range(region.start, region.stop) for s in replay.graph.reads[i]}
    read |= {s for i in region.prologue for s in replay.graph.reads[i]}
    for storage in sorted(read & slices.keys()):
        made = slices[storage].ops
        if max(made) >= region.start:
            continue
        again = frozenset(region.prologue)
        again = again - made if made <= again else again | made
        other = replace(region, prologue=tuple(sorted(again)))
        inside = (*other.prologue, *range(region.start, region.stop))
        if not any(unmade_views(other, problem, i) for i in inside):
            yield other


def _grown(
    replay: Replay, regions: tuple[Region, ...], k: int, low: int, high: int
) -> Iterator[Change]:
    """Yield regions that take in all up to their neighbours, or the next one with it.

    They keep what they kept, and of the rest what is worth it at one of several rates.
    """
    region, after = regions[k], regions[k + 1 : k + 2]
    start = next(i for i in range(low, region.start + 1) if _allowed(replay, i, region.start))
    stop = next(i for i in range(high, region.stop - 1, -1) if _allowed(replay, region.stop, i))
    wider = [
        Change(k, 1, (Region(start=start, stop=region.stop, kept=region.kept),)),
        Change(k, 1, (Region(start=region.start, stop=stop, kept=region.kept),)),
        Change(k, 1, (Region(start=start, stop=stop, kept=region.kept),)),
    ]
    if after and not after[0].children and _allowed(replay, region.stop, after[0].start):
        kept = region.kept + after[0].kept
        both = Region(start=region.start, stop=after[0].stop, kept=kept)
        wider.append(Change(k, 2, (both,)))
    for change in wider:
        (whole,) = change.others
        taken = regions[k : k + change.count]
        if (whole.start, whole.stop) == (region.start, region.stop):
            continue
        new = [
            i
            for i in range(whole.start, whole.stop)
            if not any(old.start <= i < old.stop for old in taken)
        ]
        for worth in dict.fromkeys((frozenset(), *_worth(replay))):
            kept = tuple(sorted({*whole.kept, *worth.intersection(new)}))
            grown = replace(whole, kept=kept)
            if keeps_in_step(grown, replay.problem):
                yield replace(change, others=(grown,))


def _added(replay: Replay, regions: tuple[Region, ...]) -> Iterator[Change]:
    """Yield short regions between those that there are."""
    stops = (0, *(region.stop for region in regions))
    starts = (*(region.start for region in regions), len(replay.problem.ops))
    for k, (low, high) in enumerate(zip(stops, starts, strict=True)):
        for start in range(low, high):
            for stop in range(start + 1, min(high, start + _NEW_OPS) + 1):
                if _allowed(replay, start, stop):
                    yield Change(k, 0, (Region(start=start, stop=stop),))


def _worth(replay: Replay) -> list[frozenset[int]]:
    if replay.worth is None:
        replay.worth = [worth_keeping(replay, rate) for rate in _RATES]
    return replay.worth


def _joints(replay: Replay, regions: tuple[Region, ...], k: int) -> Iterator[Change]:
    """Yield moves of the joint of two touching regions, and splits of a region in two."""
    region, after = regions[k], regions[k + 1 :]
    if after and after[0].start == region.stop and not after[0].children:
        for step in (*_STEPS, *(-step for step in _STEPS)):
            joint = region.stop + step
            if region.start < joint < after[0].stop and replay.problem.boundaries[joint]:
                left = Region(start=region.start, stop=joint)
                yield Change(k, 2, (left, Region(start=joint, stop=after[0].stop)))
    packing = [
        i + 1
        for i in range(region.start, region.stop - 1)
        if replay.graph.packs[i] and replay.problem.boundaries[i + 1]
    ]
    for joint in packing:
        left = Region(start=region.start, stop=joint)
        yield Change(k, 1, (left, Region(start=joint, stop=region.stop)))


def _allowed(replay: Replay, start: int, stop: int) -> bool:
    boundaries, pinned = replay.problem.boundaries, replay.pinned_before
    return boundaries[start] and boundaries[stop] and pinned[start] == pinned[stop]
