"""Regions with prologues, offered to the search over intervals.

Where the input of a region is read by that region alone, and is cheap to make from what is
held anyway, the region does not hold it. So ``y = f(x)`` in ``g(y, h(x))`` need not be kept
beside ``h(x)``, which the region keeps, and ``x``, which somebody saved: without a prologue a
region has to start before ``f``, and to run ``h`` again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from solvers.judge.prologue import reads_inside_others, unmade_views
from solvers.judge.replay import Replay
from solvers.plan import Region
from solvers.problem import Problem
from solvers.search.interval_search import IntervalSearch, Segment, needs_of
from solvers.search.slices import Slice, slices_of

_BEFORE = 12
_AFTER = 3


def with_prologues(search: IntervalSearch, *, joined: bool = True) -> dict[int, list[Segment]]:
    """Return regions with prologues by the position at which they end.

    Parameters
    ----------
    search : IntervalSearch
    joined : bool
        A segment begins with the first op of the prologue, and all from there to the region is
        outside regions: what these ops save is held for certain. Else a segment is the region
        alone, and what somebody saves is taken to be held, which the judge has to see.

    Notes
    -----
    A storage qualifies if making it again costs no more a byte than the whole forward does,
    and takes at most six ops. Regions start up to twelve ops before it is read first and end
    at one of three ops that save something after it is read last: linear in the number of ops.
    """
    offers = _Offers(search, joined)
    found: dict[int, list[Segment]] = {}
    for start, stop in sorted({run for storage in offers.slices for run in offers.runs(storage)}):
        segment = offers.segment(start, stop)
        if segment is not None:
            found.setdefault(stop, []).append(segment)
    return found


def without_vain_prologues(problem: Problem, regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """Drop the prologues that read what lives inside another region only."""
    while vain := {region for region, _ in reads_inside_others(regions, problem)}:
        regions = tuple(replace(r, prologue=()) if r in vain else r for r in regions)
    return regions


@dataclass(slots=True)
class _Offers:
    search: IntervalSearch
    joined: bool
    replay: Replay = field(init=False)
    saver: dict[int, int] = field(init=False)
    first: dict[int, int] = field(init=False)
    last: dict[int, int] = field(init=False)
    slices: Mapping[int, Slice] = field(init=False)

    def __post_init__(self) -> None:
        self.replay = self.search.replay
        graph = self.replay.graph
        self.saver, self.first, self.last = {}, {}, {}
        for i in range(graph.size):
            for s in graph.reads[i]:
                self.first.setdefault(s, i)
                self.last[s] = i
            if graph.release[i] is not None:
                for s in graph.saved[i]:
                    self.saver.setdefault(s, i)
        self.slices = slices_of(self.replay)

    def runs(self, storage: int) -> Iterator[tuple[int, int]]:
        """Yield the runs that may be a region which makes a storage again."""
        graph, tables = self.replay.graph, self.search.tables
        producer = graph.producer[storage]
        first, last = self.first[storage], self.last[storage]
        saving = [i + 1 for i in range(last, min(graph.size, last + 40)) if graph.packs[i]]
        for start in range(max(producer + 2, first - _BEFORE), first + 1):
            for stop in saving[:_AFTER]:
                if stop - start <= tables.reach and tables.allowed[start, stop - start]:
                    yield start, stop

    def segment(self, start: int, stop: int) -> Segment | None:
        """Return a run as a region with all the prologue that pays, or None."""
        graph, problem = self.replay.graph, self.replay.problem
        read = {s for i in range(start, stop) for s in graph.reads[i]}
        again: set[int] = set()
        freed = 0
        for s in sorted(read):
            made = self.slices.get(s)
            if made is None or not graph.producer[s] < start or self.last[s] >= stop:
                continue
            if self.saver.get(s, start) < start or min(made.ops) < start - _BEFORE:
                continue
            origin = min(made.ops) if self.joined else -1
            held = {leaf for leaf in made.leaves if origin <= self.saver.get(leaf, -1) < start}
            charged = sum(graph.nbytes[leaf] for leaf in made.leaves - read - held)
            if charged < graph.nbytes[s]:
                again |= made.ops
                freed += graph.nbytes[s] - charged
        region = Region(start=start, stop=stop, prologue=tuple(sorted(again)))
        inside = (*region.prologue, *range(start, stop))
        if not again or max(again) >= start:
            return None
        if any(unmade_views(region, problem, i) for i in inside):
            return None
        return self._priced(region, freed)

    def _priced(self, region: Region, freed: int) -> Segment:
        tables = self.search.tables
        run = region.start, region.stop - region.start
        needs, cost = needs_of(self.search, region), self.replay.profile(region).cost
        region_keeps = int(tables.region_keeps[run]) - freed
        if not self.joined:
            return Segment(
                start=region.start,
                region=region,
                keeps=region_keeps,
                needs=needs - freed,
                cost=cost,
            )
        origin = region.prologue[0]
        before = origin, region.start - origin
        passed = int(tables.freed[before])
        kept = int(tables.plain_keeps[before]) - passed - freed
        outside = max(
            int(tables.plain_forward[before]), int(tables.plain_backward[before]) - passed
        )
        return Segment(
            start=origin,
            region=region,
            keeps=kept + freed + region_keeps,
            needs=max(outside, kept + needs),
            cost=cost,
        )
