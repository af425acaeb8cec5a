"""Best nested regions over a chain of stages, with options inside each stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from solvers.bounds import peak_bound
from solvers.judge.replay import Replay, replay_of
from solvers.judge.step import NOTHING
from solvers.plan import Plan, Region
from solvers.pricing import priced, require
from solvers.problem import Problem
from solvers.search.flat import search_of
from solvers.search.interval_search import IntervalSearch
from solvers.search.local import tidied
from solvers.search.stages import stage_edges

_POINTS = 96
_LIMITS = (0.02, 0.1, 0.3, 1.0)
_OPTION_SHARES = (0.0, 0.15, 0.3, 0.5, 0.7)
_LABELS = 64

Regions = tuple[Region, ...]


def solve(problem: Problem, budget_bytes: int) -> Plan:
    """Plan nested regions over a chain of stages by dynamic programming.

    Parameters
    ----------
    problem : Problem
    budget_bytes : int
        Peak not to exceed, fixed bytes included.

    Returns
    -------
    Plan
        Status ``"feasible"``: the best persistent nested plan of the chain as the tables price
        it. Stages are the repeated blocks of the model (its ops where there are at most 24),
        and a stage outside regions may hold flat regions of its own.

    Raises
    ------
    NoPlanFoundError, InfeasibleError
        If nothing that fits was found, or nothing can exist.

    Notes
    -----
    For every run of stages, all pairs (memory needed, least cost of replaying it) that no other
    pair beats, at most 96: they serve every budget at once. With k <= 40 stages O(k^3) merges
    of such lists, O(k^2) lists.

    References
    ----------
    O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, *Optimal checkpointing for
    heterogeneous chains*, 2019, arXiv:1911.13214.

    Examples
    --------
    Eight equal ops that each save their input: the plain step needs 40 bytes.

    >>> from solvers.chains import equal_chain
    >>> problem = equal_chain(ops=8, input_bytes=4)
    >>> plan = solve(problem, 28)
    >>> plan.peak_bytes, plan.recompute_cost
    (28, 3)
    """
    started = time.perf_counter()
    replay = replay_of(problem)
    chain = chain_of(replay)
    regions = chain.regions(budget_bytes)
    regions = chain.least() if regions is None else tidied(replay, regions, budget_bytes)
    plan = priced(problem, regions, "rotor", budget_bytes, started)
    return require(problem, plan, budget_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """Flat regions inside one stage that is outside regions itself."""

    regions: Regions
    keeps: int
    forward: int
    backward: int
    cost: int
    tail: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Front:
    """Pairs of bytes needed, rising, and cost, falling; with how each came about."""

    needs: NDArray[np.int64]
    costs: NDArray[np.int64]
    steps: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.needs)


_NO_STEP = np.zeros((1, 4), np.int64)
_DONE = _Front(needs=np.zeros(1, np.int64), costs=np.zeros(1, np.int64), steps=_NO_STEP)
_NONE = _Front(needs=np.zeros(0, np.int64), costs=np.zeros(0, np.int64), steps=_NO_STEP[:0])


@dataclass(slots=True)
class Chain:
    """The fronts of one problem: of replaying every run of stages, and of every rest of the step.

    A step of a front is (stage after it, option or -1 for a region, point inside, point of the
    rest).
    """

    replay: Replay
    edges: tuple[int, ...]
    options: list[list[_Option]] = field(init=False)
    inside: dict[tuple[int, int], _Front] = field(init=False, default_factory=dict)
    rest: list[_Front] = field(init=False)
    _search: IntervalSearch = field(init=False)

    def __post_init__(self) -> None:
        self._search = search_of(self.replay)
        self.edges = _within(self.edges, self._search.tables.reach, self.replay)
        stages = len(self.edges) - 1
        self.options = [self._options(k) for k in range(stages)]
        for length in range(1, stages + 1):
            for first in range(stages - length + 1):
                self.inside[first, first + length] = self._replays(first, first + length)
        self.rest = [_DONE] * (stages + 1)
        for first in range(stages - 1, -1, -1):
            self.rest[first] = _pruned(list(self._continuations(first, stages, top=True)))

    # Tables

    def _at(self, table: NDArray[np.int64], first: int, last: int) -> int:
        start, stop = self.edges[first], self.edges[last]
        return int(table[start, stop - start])

    def _in_reach(self, first: int, last: int) -> bool:
        start, stop = self.edges[first], self.edges[last]
        tables = self._search.tables
        return stop - start <= tables.reach and bool(tables.allowed[start, stop - start])

    def _forward_cost(self, start: int, stop: int) -> int:
        return sum(op.cost for op in self.replay.problem.ops[start:stop])

    def _found(self, first: int, last: int) -> int:
        """Return gradients that a replay of these stages finds, above what forward counts."""
        before = np.maximum(*self.replay.before)[self.edges[first] : self.edges[last]]
        graph = self.replay.graph
        triggers = [
            i
            for i in range(self.edges[first], self.edges[last])
            if graph.packs[i] and graph.reached[i]
        ]
        if not triggers:
            return 0
        found = int(before[triggers[-1] - self.edges[first]]) - max(self.replay.bases)
        return found + self._search.tables.outputs_bytes

    # Options inside a stage

    def _options(self, stage: int) -> list[_Option]:
        low, high = self.edges[stage], self.edges[stage + 1]
        found: dict[Regions, None] = {(): None}
        if high - low > 1 and high - low <= self._search.tables.reach:
            least, plain = peak_bound(self.replay.problem), self.replay.price(())[0]
            limits = [least + int(share * (plain - least)) for share in _LIMITS]
            span = max(1, int(self._search.tables.plain_keeps[low, high - low]))
            labels = self._search.search(limits, {}, low, high, labels=_LABELS, span_bytes=span)
            for budget, number in enumerate(labels.count[high - low]):
                kept = labels.kept[high - low, budget, :number]
                for share in _OPTION_SHARES:
                    label = int(kept.searchsorted(share * span, "right")) - 1
                    if label >= 0:
                        regions = self._search.regions(labels, high, budget=budget, label=label)
                        found[regions or ()] = None
        options = [self._option(low, high, regions) for regions in found]
        return [
            o
            for o in options
            if o.regions == () or (o.regions[0].start, o.regions[0].stop) != (low, high)
        ]

    def _option(self, low: int, high: int, regions: Regions) -> _Option:
        tables = self._search.tables
        kept, forward, backward, cost = 0, NOTHING, NOTHING, 0
        for start, stop, region in _runs(low, high, regions):
            at = start, stop - start
            freed = 0 if region else int(tables.freed[at])
            if region:
                forward = max(forward, kept + int(tables.region_forward[at]))
                backward = max(backward, kept + int(tables.region_needs[at]))
                cost += int(tables.region_cost[at])
                kept += int(tables.region_keeps[at])
            else:
                forward = max(forward, kept + int(tables.plain_forward[at]))
                backward = max(backward, kept + int(tables.plain_backward[at]) - freed)
                kept += int(tables.plain_keeps[at]) - freed
        last = max((i for i in range(low, high) if self.replay.graph.packs[i]), default=low)
        if regions and last < regions[-1].stop:
            tail = self._forward_cost(low, regions[-1].start)
        else:
            tail = int(tables.region_cost[low, high - low])
        return _Option(
            regions=regions, keeps=kept, forward=forward, backward=backward, cost=cost, tail=tail
        )

    # Fronts

    def _replays(self, first: int, last: int) -> _Front:
        """Return needs and costs of replaying these stages as a region."""
        if not self._in_reach(first, last):
            return _NONE
        found = list(self._continuations(first, last, top=False))
        if last == first + 1:
            gradients = self._found(first, last)
            needs = self._at(self._search.tables.region_needs, first, last)
            for k, option in enumerate(self.options[first]):
                need = needs
                if option.regions:
                    need = max(option.forward + gradients, option.backward)
                point = _Front(
                    needs=np.array([need]),
                    costs=np.array([option.tail + option.cost]),
                    steps=np.array([[last, k, 0, 0]]),
                )
                found.append(point)
        return _pruned(found)

    def _continuations(self, first: int, last: int, *, top: bool) -> Iterator[_Front]:
        """Yield the fronts of a first stage outside regions, or a first region, and the rest."""
        tables = self._search.tables
        gradients = 0 if top else self._found(first, last)
        after = self.rest[first + 1] if top else self.inside.get((first + 1, last), _NONE)
        again = 0 if top else self._forward_cost(self.edges[first], self.edges[first + 1])
        for k, option in enumerate(self.options[first]):
            floor = max(option.forward + gradients, option.backward)
            yield _joined(_DONE, after, floor, option.keeps, again + option.cost, (first + 1, k))
        for stage in range(first + 1, last + (1 if top else 0)):
            region = self.inside[first, stage]
            rest = self.rest[stage] if top else self.inside[stage, last]
            if not len(region) or not len(rest):
                continue
            floor = self._at(tables.region_forward, first, stage) + gradients
            keeps = self._at(tables.region_keeps, first, stage)
            again = 0
            if not top:
                again = self._forward_cost(self.edges[first], self.edges[stage])
            yield _joined(region, rest, floor, keeps, again, (stage, -1))

    # Plans

    def regions(self, budget_bytes: int) -> Regions | None:
        """Return the cheapest regions that the judge finds to fit, or None.

        The tables may count a storage too much: what they put so far above the budget is asked
        too, the cheapest first.
        """
        slack = max((storage.nbytes for storage in self.replay.problem.storages), default=0)
        front = self.rest[0]
        for point in range(int(front.needs.searchsorted(budget_bytes + slack, "right")))[::-1]:
            regions = self._build(0, len(self.edges) - 1, front, point, top=True)
            if self.replay.price(regions)[0] <= budget_bytes:
                return regions
        return None

    def least(self) -> Regions:
        """Return the regions of least peak, which need not be those of least need."""
        front, last = self.rest[0], len(self.edges) - 1
        points = (self._build(0, last, front, point, top=True) for point in range(len(front)))
        return min(points, key=self.replay.price, default=())

    def _build(self, first: int, last: int, front: _Front, point: int, *, top: bool) -> Regions:
        regions: list[Region] = []
        while first < last:
            stage, option, within, after = (int(x) for x in front.steps[point])
            if option >= 0:
                regions += self.options[first][option].regions
            else:
                children = self._build(first, stage, self.inside[first, stage], within, top=False)
                start, stop = self.edges[first], self.edges[stage]
                regions.append(Region(start=start, stop=stop, children=children))
            first, point = stage, after
            if first < last:
                front = self.rest[first] if top else self.inside[first, last]
        return tuple(regions)


def _runs(low: int, high: int, regions: Regions) -> Iterator[tuple[int, int, bool]]:
    for region in regions:
        if low < region.start:
            yield low, region.start, False
        yield region.start, region.stop, True
        low = region.stop
    if low < high:
        yield low, high, False


def _joined(
    inner: _Front, rest: _Front, floor: int, keeps: int, cost: int, step: tuple[int, int]
) -> _Front:
    """Return the front of doing one thing before another: the needs' maximum, the costs' sum."""
    if not len(inner) or not len(rest):
        return _NONE
    rest_needs = rest.needs + keeps
    needs = np.unique(np.concatenate([inner.needs, rest_needs]))
    needs = np.unique(np.maximum(needs, max(floor, int(inner.needs[0]), int(rest_needs[0]))))
    within = inner.needs.searchsorted(needs, "right") - 1
    after = rest_needs.searchsorted(needs, "right") - 1
    steps = np.empty((len(needs), 4), np.int64)
    steps[:, 0], steps[:, 1] = step
    steps[:, 2], steps[:, 3] = within, after
    costs = inner.costs[within] + rest.costs[after] + cost
    return _Front(needs=needs, costs=costs, steps=steps)


def _pruned(fronts: list[_Front]) -> _Front:
    """Return the points of all fronts that no other point beats, at most ``_POINTS``."""
    fronts = [front for front in fronts if len(front)]
    if not fronts:
        return _NONE
    needs = np.concatenate([front.needs for front in fronts])
    costs = np.concatenate([front.costs for front in fronts])
    steps = np.concatenate([front.steps for front in fronts])
    order = np.lexsort((costs, needs))
    falling = np.ones(len(order), bool)
    falling[1:] = costs[order][1:] < np.minimum.accumulate(costs[order])[:-1]
    order = order[falling]
    if len(order) > _POINTS:
        order = order[np.unique(np.linspace(0, len(order) - 1, _POINTS).astype(int))]
    return _Front(needs=needs[order], costs=costs[order], steps=steps[order])


def _within(edges: tuple[int, ...], reach: int, replay: Replay) -> tuple[int, ...]:
    """Cut stages that are longer than the runs in the tables, where a region may begin."""
    found = [edges[0]]
    for edge in edges[1:]:
        while edge - found[-1] > reach:
            farthest = found[-1] + reach
            inside = range(farthest, found[-1], -1)
            boundaries = replay.problem.boundaries
            found.append(next((i for i in inside if boundaries[i]), farthest))
        found.append(edge)
    return tuple(found)


def chain_of(replay: Replay) -> Chain:
    """Return the fronts of a problem, made once as long as its tables are kept."""
    found = replay.chain
    if found is None:
        found = replay.chain = Chain(replay, stage_edges(replay))
    assert isinstance(found, Chain)
    return found
