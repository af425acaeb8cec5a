"""Regions inside regions, for budgets that flat regions do not reach."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from solvers.judge.replay import Replay
from solvers.plan import Region
from solvers.search.flat import search_of
from solvers.search.interval_search import IntervalSearch, Segment, needs_of
from solvers.search.stages import stage_edges

_CUTS = 26
_SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
_LEVELS = 2
_ALL_OPS = 400
_LABELS = 48


def nested_segments(replay: Replay, budget_bytes: int) -> dict[int, list[Segment]]:
    """Return parents, with what is best inside each, by the position at which they end.

    A parent's inside is searched like a whole step, for the budget less what may be kept
    before it. Parents start and stop at the cheapest cuts only. A second round puts parents
    into parents.

    Notes
    -----
    With c cuts: O(c) searches a round.
    """
    search = search_of(replay, _ALL_OPS)
    cuts = _cuts(search)
    reach = min(1 + replay.graph.size // 2, search.tables.reach)
    room = budget_bytes - replay.bases[1]
    budgets = [budget_bytes - int(share * room) for share in _SHARES]
    offered: dict[int, list[Segment]] = {}
    for _ in range(_LEVELS):
        found: dict[Region, Segment] = {}
        for start in cuts[:-1]:
            end = min(start + reach, cuts[-1])
            labels = search.search(budgets, offered, start, end, labels=_LABELS)
            for stop in (stop for stop in cuts if start < stop <= end):
                insides = [search.regions(labels, stop, budget=k) for k in range(len(budgets))]
                for children in dict.fromkeys(inside for inside in insides if inside):
                    segment = _segment(search, start, stop, children)
                    if segment is not None and segment.needs <= budget_bytes:
                        found[segment.region] = segment
        offered = {}
        for segment in found.values():
            offered.setdefault(segment.region.stop, []).append(segment)
    return offered


def _cuts(search: IntervalSearch) -> list[int]:
    """Return where stages meet, and the edges that the fewest bytes cross, one per equal share.

    A parent that is one layer has regions inside that are not called again where only their
    inputs are wanted.
    """
    replay = search.replay
    size = replay.graph.size
    crossing = search.tables.crossing
    edges = np.linspace(0, size, _CUTS + 1).astype(int)
    positions = [i for i in search.positions if replay.problem.boundaries[i]]
    cuts = {0, size, *(i for i in stage_edges(replay) if replay.problem.boundaries[i])}
    for low, high in pairwise(edges):
        inside = [i for i in positions if low <= i < high]
        if inside:
            cuts.add(min(inside, key=lambda i: (int(crossing[i]), i)))
    return sorted(cuts)


def _segment(
    search: IntervalSearch, start: int, stop: int, children: tuple[Region, ...]
) -> Segment | None:
    tables, replay = search.tables, search.replay
    if not children or not tables.allowed[start, stop - start]:
        return None
    if any((child.start, child.stop) == (start, stop) for child in children):
        return None
    region = Region(start=start, stop=stop, children=children)
    return Segment(
        start=start,
        region=region,
        keeps=int(tables.region_keeps[start, stop - start]),
        needs=needs_of(search, region),
        cost=replay.profile(region).cost,
    )


def best_nested(replay: Replay, budget_bytes: int) -> tuple[Region, ...] | None:
    """Return the cheapest regions found, nested where it pays, or None if none fit."""
    search = search_of(replay, _ALL_OPS)
    asked = budget_bytes
    for _ in range(3):
        regions = search.run(asked, nested_segments(replay, asked))
        if regions is None:
            return None
        peak, _ = replay.price(regions)
        if peak <= budget_bytes:
            return regions
        asked -= peak - budget_bytes
    return None
