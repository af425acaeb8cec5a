"""Regions that keep some of their ops, offered to the search over intervals."""

from __future__ import annotations

from collections.abc import Iterator

from solvers.graph import Graph
from solvers.interval_search import IntervalSearch, Segment, needs_of
from solvers.keeping import held_for, keepable_ops
from solvers.plan import Region
from solvers.replay import Replay

_BEFORE = 32
_AFTER = 4


def with_kept(search: IntervalSearch) -> dict[int, list[Segment]]:
    """Return regions around ops that save their own result, and keep it, by where they end.

    Parameters
    ----------
    search : IntervalSearch

    Notes
    -----
    Regions start up to 32 ops before such an op and end with one of four ops that save something
    after it. They keep it, or every op in them of which a byte costs as much as one of the whole
    forward does, or more. Linear in the number of ops.
    """
    replay = search.replay
    worth = _worth_keeping(replay)
    own = frozenset(op for op in worth if _saves_itself(replay, op))
    runs = {run for op in own for run in _runs(search, op)}
    found: dict[int, list[Segment]] = {}
    for start, stop in sorted(runs):
        inside = range(start, stop)
        for kept in dict.fromkeys(tuple(i for i in inside if i in ops) for ops in (worth, own)):
            segment = _segment(search, Region(start=start, stop=stop, kept=kept))
            found.setdefault(stop, []).append(segment)
    return found


def _worth_keeping(replay: Replay) -> frozenset[int]:
    problem, graph = replay.problem, replay.graph
    room = replay.price(())[0] - replay.bases[0]

    def is_worth(index: int) -> bool:
        nbytes = sum(graph.nbytes[s] for s in held_for(problem, index))
        return problem.ops[index].cost * room >= nbytes * replay.forward_cost

    return frozenset(index for index in keepable_ops(problem) if is_worth(index))


def _saves_itself(replay: Replay, index: int) -> bool:
    graph = replay.graph
    return graph.reached[index] and not set(graph.produced[index]).isdisjoint(graph.saved[index])


def _runs(search: IntervalSearch, index: int) -> Iterator[tuple[int, int]]:
    graph, tables = search.replay.graph, search.tables
    after = range(index, min(graph.size, index + 2 * _BEFORE))
    stops = [i + 1 for i in after if graph.packs[i]][:_AFTER]
    for start in range(max(0, index - _BEFORE), index):
        if not _makes(graph, start):
            continue
        for stop in stops:
            if stop - start <= tables.reach and tables.allowed[start, stop - start]:
                yield start, stop


def _makes(graph: Graph, index: int) -> bool:
    """Tell whether an op makes anything: a region that starts with a view can start after it."""
    return bool(graph.produced[index])


def _segment(search: IntervalSearch, region: Region) -> Segment:
    replay, tables = search.replay, search.tables
    graph = replay.graph
    run = region.start, region.stop - region.start
    held = {s for i in region.kept for s in held_for(replay.problem, i)}
    # What is read after the region is part of what any region keeps.
    inner = sum(graph.nbytes[s] for s in held if graph.last_use[s] < region.stop)
    return Segment(
        start=region.start,
        region=region,
        keeps=int(tables.region_keeps[run]) + inner,
        needs=needs_of(search, region) + sum(graph.nbytes[s] for s in held),
        cost=replay.profile(region).cost,
    )
