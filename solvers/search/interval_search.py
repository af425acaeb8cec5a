"""Labels (position, kept bytes, cost) over the op order: the search behind several solvers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from solvers.judge.replay import Replay
from solvers.plan import Region
from solvers.search.intervals import Intervals

ALL_OPS = 800
LABELS = 1024
_PLAIN_STEPS = 12
_REGION_OPS = 160
_UNREACHED = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A region that is offered to the search beside the tabulated runs.

    ``start`` is where it begins, before the region if it takes in ops outside regions.
    """

    start: int
    region: Region
    keeps: int
    needs: int
    cost: int


Offered = Mapping[int, Sequence[Segment]]
"""Segments by the position at which they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edges:
    """Segments that end at one position: regions first, then runs outside regions."""

    sources: NDArray[np.intp]
    regions: int
    keeps: NDArray[np.int64]
    needs: NDArray[np.int64]
    costs: NDArray[np.int64]

    def with_segments(self, segments: Sequence[Segment]) -> _Edges:
        """Return these edges with those of ``segments`` after them."""
        rows = np.array([[s.start, s.keeps, s.needs, s.cost] for s in segments], np.int64)
        return _Edges(
            sources=np.concatenate([self.sources, rows[:, 0]]).astype(np.intp),
            regions=self.regions,
            keeps=np.concatenate([self.keeps, rows[:, 1]]),
            needs=np.concatenate([self.needs, rows[:, 2]]),
            costs=np.concatenate([self.costs, rows[:, 3]]),
        )


@dataclass(slots=True)
class Labels:
    """What a search found: per position from ``start`` on and per budget, some labels.

    ``kept``, ``cost`` and ``came_from`` (edge and label) are indexed by position less
    ``start``, budget and label; ``count`` by position and budget.
    """

    start: int
    kept: NDArray[np.int64]
    cost: NDArray[np.int64]
    came_from: NDArray[np.int32]
    count: NDArray[np.intp]
    offered: Offered


@dataclass(slots=True)
class IntervalSearch:
    """Labels of one problem, ready for any budget.

    Every position has labels (kept bytes, cost), none dominated by another, at most one per
    bin of kept bytes. The bytes themselves are exact, the bins only choose what to drop.

    Attributes
    ----------
    replay : Replay
    tables : Intervals
    positions : tuple of int
        Where segments may start and stop, rising.
    """

    replay: Replay
    tables: Intervals
    positions: tuple[int, ...]
    _edges: dict[int, _Edges] = field(init=False, default_factory=dict)

    def _edges_into(self, stop: int) -> _Edges:
        edges = self._edges.get(stop)
        if edges is None:
            edges = self._edges[stop] = self._make_edges(stop)
        return edges

    def _make_edges(self, stop: int) -> _Edges:
        tables, positions = self.tables, np.array(self.positions, np.intp)
        end = int(np.searchsorted(positions, stop))
        earlier = positions[max(0, end - _REGION_OPS) : end]
        earlier = earlier[stop - earlier <= tables.reach]
        starts = earlier[tables.allowed[earlier, stop - earlier]]
        region = starts, stop - starts
        plain = earlier[-_PLAIN_STEPS:]
        run = plain, stop - plain
        freed = tables.freed[run]
        plain_needs = np.maximum(tables.plain_forward[run], tables.plain_backward[run] - freed)
        plain_keeps = tables.plain_keeps[run] - freed
        none = np.zeros(len(plain), np.int64)
        return _Edges(
            sources=np.concatenate([starts, plain]),
            regions=len(starts),
            keeps=np.concatenate([tables.region_keeps[region], plain_keeps]),
            needs=np.concatenate([tables.region_needs[region], plain_needs]),
            costs=np.concatenate([tables.region_cost[region], none]),
        )

    def run(
        self, budget_bytes: int, offered: Offered | None = None, *, dearer: float = 1.0
    ) -> tuple[Region, ...] | None:
        """Return the cheapest regions found whose tabulated peak fits, or None.

        In problems of thousands of ops many a storage is smaller than a bin, and what a region
        saves by it would be lost: there a byte has a price, `dearer` times the average one.
        """
        price = dearer * self.average_price() if self.is_coarse else 0.0
        labels = self.search((budget_bytes,), offered or {}, price=price)
        return self.regions(labels, self.replay.graph.size)

    @property
    def is_coarse(self) -> bool:
        """Whether a problem is so large that bins are wide beside storages, and judging slow."""
        return self.replay.graph.size > ALL_OPS

    def average_price(self) -> float:
        """Return the cost of a byte where all of a forward's are bought with all of its cost."""
        replay = self.replay
        return replay.forward_cost / max(1, replay.plain_room)

    def search(
        self,
        budgets: Sequence[int],
        offered: Offered,
        start: int = 0,
        end: int | None = None,
        *,
        labels: int = LABELS,
        span_bytes: int | None = None,
        price: float = 0.0,
    ) -> Labels:
        """Label the positions after ``start`` as if nothing were kept before it.

        Parameters
        ----------
        budgets : sequence of int
            Searched side by side.
        offered : dict of int to list of Segment
            Nested regions, or regions with prologues.
        start, end : int
        labels : int
            Most labels of a position.
        span_bytes : int, optional
            Kept bytes over which the bins spread; all that a budget has room for by default.
        price : float
            Cost of a kept byte, when a bin chooses among labels.
        """
        end = self.replay.graph.size if end is None else end
        limits = np.array(budgets, np.int64)
        room = limits - self.replay.bases[1]
        if span_bytes is not None:
            room = np.full_like(limits, span_bytes)
        widths = np.maximum(1, -(-room // labels))
        shape = (end - start + 1, len(budgets), labels)
        found = Labels(
            start=start,
            kept=np.zeros(shape, np.int64),
            cost=np.full(shape, _UNREACHED, np.int64),
            came_from=np.zeros((*shape, 2), np.int32),
            count=np.zeros(shape[:2], np.intp),
            offered=offered,
        )
        found.cost[0, :, 0], found.count[0] = 0, 1
        for stop in self.positions:
            if start < stop <= end:
                edges = self._edges_into(stop)
                if segments := offered.get(stop):
                    edges = edges.with_segments(segments)
                _extend(found, stop - start, edges, limits, widths, price)
        return found

    def regions(
        self, labels: Labels, position: int, *, budget: int = 0, label: int | None = None
    ) -> tuple[Region, ...] | None:
        """Return the regions of a label at a position, the cheapest by default.

        None if there is no label.
        """
        at = position - labels.start
        number = int(labels.count[at, budget])
        if not number:
            return None
        if label is None:
            label = int(labels.cost[at, budget, :number].argmin())
        regions = []
        while position > labels.start:
            edge, label = (int(x) for x in labels.came_from[position - labels.start, budget, label])
            edges = self._edges_into(position)
            if edge >= len(edges.sources):
                segment = labels.offered[position][edge - len(edges.sources)]
                regions.append(segment.region)
                position = segment.start
                continue
            start = int(edges.sources[edge])
            if edge < edges.regions:
                regions.append(Region(start=start, stop=position))
            position = start
        return tuple(reversed(regions))


def _extend(
    found: Labels,
    at: int,
    edges: _Edges,
    limits: NDArray[np.int64],
    widths: NDArray[np.int64],
    price: float,
) -> None:
    """Give a position its labels, from those of all positions from which an edge leads there."""
    sources = edges.sources - found.start
    first = np.flatnonzero(sources >= 0)
    sources = sources[first]
    active = int(found.count[sources].max(initial=0))
    if not active:
        return
    kept = found.kept[sources, :, :active]
    cost = found.cost[sources, :, :active]
    fits = kept <= limits[None, :, None] - edges.needs[first, None, None]
    fits &= cost < _UNREACHED
    fitting = np.flatnonzero(fits)
    if not len(fitting):
        return
    edge = first[fitting // (len(limits) * active)]
    kept = kept.ravel()[fitting] + edges.keeps[edge]
    cost = cost.ravel()[fitting] + edges.costs[edge]
    labels = found.kept.shape[2]
    group = fitting // active % len(limits) if len(limits) > 1 else np.zeros_like(fitting)
    bins = np.clip(kept // widths[group], 0, labels - 1) + group * labels
    chosen = _undominated(kept, cost, bins, (len(limits), labels), price)
    group, label = group[chosen], fitting[chosen] % active
    number = np.bincount(group, minlength=len(limits))
    slot = np.arange(len(chosen)) - np.repeat(np.cumsum(number) - number, number)
    found.count[at] = number
    found.kept[at, group, slot] = kept[chosen]
    found.cost[at, group, slot] = cost[chosen]
    found.came_from[at, group, slot, 0] = edge[chosen]
    found.came_from[at, group, slot, 1] = label


def _undominated(
    kept: NDArray[np.int64],
    cost: NDArray[np.int64],
    bins: NDArray[np.int64],
    shape: tuple[int, int],
    price: float,
) -> NDArray[np.intp]:
    """Return the indices of the labels to go on with, by rising bytes and falling cost."""
    key = cost + price * kept if price else cost
    best = np.full(shape, _UNREACHED, key.dtype)
    np.minimum.at(best.ravel(), bins, key)
    index = np.flatnonzero(key == best.ravel()[bins])
    order = np.lexsort((index, kept[index], bins[index]))
    index = index[order]
    sorted_bins = bins[index]
    first = np.ones(len(index), bool)
    first[1:] = sorted_bins[1:] != sorted_bins[:-1]
    index = index[first]
    costs = np.full(shape, _UNREACHED, np.int64)
    costs.ravel()[bins[index]] = cost[index]
    falling = np.ones(shape, bool)
    falling[:, 1:] = costs[:, 1:] < np.minimum.accumulate(costs, axis=1)[:, :-1]
    chosen: NDArray[np.intp] = index[falling.ravel()[bins[index]]]
    return chosen


def all_positions(size: int) -> tuple[int, ...]:
    """Return every position of a problem of ``size`` ops."""
    return tuple(range(size + 1))


def needs_of(search: IntervalSearch, region: Region) -> int:
    """Return the peak that a region brings about, above what was kept before it."""
    tables, replay = search.tables, search.replay
    profile = replay.profile(region)
    span = slice(region.start, region.stop)
    needs = int(tables.region_forward[region.start, region.stop - region.start])
    for mode in (0, 1):
        for levels, gradients in (
            (profile.replay, replay.before[mode]),
            (profile.instant, replay.instant[mode]),
            (profile.after, replay.after[mode]),
        ):
            needs = max(needs, int((levels + gradients[span]).max()) + tables.outputs_bytes)
    random = sum(frame.random for frame in profile.frame.walk())
    return needs + 2 * random * replay.problem.random_state_bytes
