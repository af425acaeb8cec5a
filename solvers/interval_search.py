"""Labels (position, kept bytes, cost) over the op order: the search behind several solvers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from solvers.intervals import Intervals, make_intervals
from solvers.plan import Region
from solvers.replay import Replay

_LABELS = 1024
_PLAIN_OPS = 12
_REGION_OPS = 160
_TRIES = 4
_UNREACHED = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A region with regions inside, offered to the search beside the tabulated runs."""

    region: Region
    keeps: int
    needs: int
    cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edges:
    """Segments that end at one position: regions first, then runs outside regions.

    ``keeps``, ``needs`` and ``costs`` are columns, to be added to rows of labels.
    """

    sources: NDArray[np.intp]
    regions: int
    keeps: NDArray[np.int64]
    needs: NDArray[np.int64]
    costs: NDArray[np.int64]

    def with_segments(self, segments: list[Segment]) -> _Edges:
        """Return these edges with those of ``segments`` after them."""
        rows = np.array([[s.region.start, s.keeps, s.needs, s.cost] for s in segments], np.int64)
        return _Edges(
            sources=np.concatenate([self.sources, rows[:, 0]]).astype(np.intp),
            regions=self.regions,
            keeps=np.concatenate([self.keeps, rows[:, 1:2]]),
            needs=np.concatenate([self.needs, rows[:, 2:3]]),
            costs=np.concatenate([self.costs, rows[:, 3:4]]),
        )


@dataclass(slots=True)
class Labels:
    """What a search found for every position."""

    start: int
    kept: NDArray[np.int64]
    cost: NDArray[np.int64]
    came_from: NDArray[np.int64]
    count: NDArray[np.intp]
    offered: dict[int, list[Segment]]


@dataclass(slots=True)
class IntervalSearch:
    """Labels of one problem, ready for any budget.

    Every position has labels (kept bytes, cost), none dominated by another, at most one per
    bin of kept bytes. The bytes themselves are exact, the bins only choose what to drop.
    """

    replay: Replay
    tables: Intervals = field(init=False)
    _edges: list[_Edges] = field(init=False)

    def __post_init__(self) -> None:
        self.tables = make_intervals(self.replay)
        size = self.replay.graph.size
        region_ops = _REGION_OPS if size <= 800 else max(40, _REGION_OPS * 800 // size)
        self._edges = [self._edges_into(stop, region_ops) for stop in range(size + 1)]

    def _edges_into(self, stop: int, region_ops: int) -> _Edges:
        tables = self.tables
        low = max(0, stop - region_ops)
        starts = low + np.flatnonzero(tables.allowed[low:stop, stop])
        plain = np.arange(max(0, stop - _PLAIN_OPS), stop)
        freed = tables.freed[plain, stop]
        plain_needs = np.maximum(
            tables.plain_forward[plain, stop], tables.plain_backward[plain, stop] - freed
        )
        plain_keeps = tables.plain_keeps[plain, stop] - freed
        none = np.zeros(len(plain), np.int64)
        return _Edges(
            sources=np.concatenate([starts, plain]).astype(np.intp),
            regions=len(starts),
            keeps=np.concatenate([tables.region_keeps[starts, stop], plain_keeps])[:, None],
            needs=np.concatenate([tables.region_needs[starts, stop], plain_needs])[:, None],
            costs=np.concatenate([tables.region_cost[starts, stop], none])[:, None],
        )

    def run(
        self, budget_bytes: int, offered: dict[int, list[Segment]] | None = None
    ) -> tuple[Region, ...] | None:
        """Return the cheapest regions found whose tabulated peak fits, or None."""
        return self.regions(self.search(budget_bytes, offered or {}), self.replay.graph.size)

    def search(
        self,
        budget_bytes: int,
        offered: dict[int, list[Segment]],
        start: int = 0,
        end: int | None = None,
    ) -> Labels:
        """Label the positions after ``start`` as if nothing were kept before it.

        Parameters
        ----------
        budget_bytes : int
        offered : dict of int to list of Segment
            Nested regions, by the position at which they end.
        start, end : int
        """
        size = self.replay.graph.size if end is None else end
        kept = np.zeros((size + 1, _LABELS), np.int64)
        cost = np.full((size + 1, _LABELS), _UNREACHED, np.int64)
        came_from = np.zeros((size + 1, _LABELS, 2), np.int64)
        count = np.zeros(size + 1, np.intp)
        cost[start, 0], count[start] = 0, 1
        width = max(1, -(-(budget_bytes - self.replay.bases[1]) // _LABELS))
        for stop in range(start + 1, size + 1):
            edges = self._edges[stop]
            if segments := offered.get(stop):
                edges = edges.with_segments(segments)
            labels = int(count[edges.sources].max(initial=0))
            if not labels:
                continue
            old_kept, old_cost = kept[edges.sources, :labels], cost[edges.sources, :labels]
            fits = (old_kept + edges.needs <= budget_bytes) & (old_cost < _UNREACHED)
            new_cost = np.where(fits, old_cost + edges.costs, _UNREACHED).ravel()
            new_kept = (old_kept + edges.keeps).ravel()
            chosen = _undominated(new_kept, new_cost, width)
            number = len(chosen)
            count[stop] = number
            kept[stop, :number] = new_kept[chosen]
            cost[stop, :number] = new_cost[chosen]
            came_from[stop, :number, 0] = chosen // labels
            came_from[stop, :number, 1] = chosen % labels
        return Labels(
            start=start, kept=kept, cost=cost, came_from=came_from, count=count, offered=offered
        )

    def regions(self, labels: Labels, position: int) -> tuple[Region, ...] | None:
        """Return the regions of the cheapest label at a position, or None without any."""
        number = int(labels.count[position])
        if not number:
            return None
        label = int(labels.cost[position, :number].argmin())
        regions = []
        while position > labels.start:
            edge, label = (int(x) for x in labels.came_from[position, label])
            edges = self._edges[position]
            if edge >= len(edges.sources):
                regions.append(labels.offered[position][edge - len(edges.sources)].region)
                position = regions[-1].start
                continue
            start = int(edges.sources[edge])
            if edge < edges.regions:
                regions.append(Region(start=start, stop=position))
            position = start
        return tuple(reversed(regions))


def _undominated(kept: NDArray[np.int64], cost: NDArray[np.int64], width: int) -> NDArray[np.intp]:
    """Return the indices of the labels to go on with, by rising bytes and falling cost."""
    index = np.flatnonzero(cost < _UNREACHED)
    if not len(index):
        return index
    bins = np.clip(kept[index] // width, 0, _LABELS - 1)
    best = np.full(_LABELS, _UNREACHED, np.int64)
    np.minimum.at(best, bins, cost[index])
    tied = cost[index] == best[bins]
    index, bins = index[tied], bins[tied]
    order = np.lexsort((index, kept[index], bins))
    index, bins = index[order], bins[order]
    first = np.ones(len(bins), bool)
    first[1:] = bins[1:] != bins[:-1]
    index = index[first]
    costs = cost[index]
    falling = np.ones(len(index), bool)
    falling[1:] = costs[1:] < np.minimum.accumulate(costs)[:-1]
    kept_labels: NDArray[np.intp] = index[falling]
    return kept_labels


def search_of(replay: Replay) -> IntervalSearch:
    """Return the search of a problem, made once as long as its tables are kept."""
    if replay.search is None:
        replay.search = IntervalSearch(replay)
    found = replay.search
    assert isinstance(found, IntervalSearch)
    return found


def best_flat(replay: Replay, budget_bytes: int) -> tuple[Region, ...] | None:
    """Return the cheapest flat regions found that the judge lets pass, or None.

    The tables differ from the judge by little; the budget they are asked for is moved until
    what they give is just inside the real one.
    """
    search = search_of(replay)
    asked = budget_bytes
    for _ in range(_TRIES):
        regions = search.run(asked)
        if regions is None:
            return None
        peak, _ = replay.price(regions)
        if peak <= budget_bytes:
            return without_idle(replay, regions, budget_bytes)
        asked -= max(peak - budget_bytes, (budget_bytes - replay.bases[1]) // _LABELS)
    return None


def without_idle(
    replay: Replay, regions: tuple[Region, ...], budget_bytes: int
) -> tuple[Region, ...]:
    """Drop the regions without which the plan fits as well."""
    for region in sorted(regions, key=lambda region: -replay.profile(region).cost):
        fewer = tuple(other for other in regions if other is not region)
        if replay.price(fewer)[0] <= budget_bytes:
            regions = fewer
    return regions
