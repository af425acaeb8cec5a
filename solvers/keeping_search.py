"""Regions that keep some of their ops, offered to the search over intervals."""

from __future__ import annotations

from collections.abc import Iterator

from solvers.interval_search import IntervalSearch, Segment
from solvers.keeping import held_for, keeps_in_step
from solvers.plan import Region
from solvers.replay import Replay
from solvers.replayed import Replays

_REACH = 128
# From an eighth to sixteen times what a byte of the whole forward costs.
RATES = tuple(2.0**power for power in range(-3, 5))


def worth_keeping(replay: Replay, rate: float) -> frozenset[int]:
    """Return ops of which a byte costs ``rate`` times what one of the whole forward does."""
    problem, graph = replay.problem, replay.graph
    room = replay.price(())[0] - replay.bases[0]

    def is_worth(index: int) -> bool:
        nbytes = sum(graph.nbytes[s] for s in held_for(problem, index))
        return problem.ops[index].cost * room >= rate * nbytes * replay.forward_cost

    return frozenset(index for index in replay.keepable if is_worth(index))


def with_any_kept(search: IntervalSearch) -> dict[int, list[Segment]]:
    """Return regions that keep what is worth it at any of the rates, by where they end."""
    sets = dict.fromkeys(worth_keeping(search.replay, rate) for rate in RATES)
    found: dict[int, dict[Region, Segment]] = {}
    for worth in sets:
        for stop, segments in with_kept(search, worth).items():
            found.setdefault(stop, {}).update((segment.region, segment) for segment in segments)
    return {stop: [*segments.values()] for stop, segments in found.items()}


def with_kept(search: IntervalSearch, worth: frozenset[int]) -> dict[int, list[Segment]]:
    """Return regions that keep what is worth it, by where they end.

    Parameters
    ----------
    search : IntervalSearch
    worth : frozenset of int
        Ops that are kept where a replay needs anything of them.

    Notes
    -----
    Regions of at most 128 ops that begin with an op that runs again and end with one that saves
    something. Linear in the number of ops.
    """
    found: dict[int, list[Segment]] = {}
    if worth:
        for segment in _segments(search, worth):
            found.setdefault(segment.region.stop, []).append(segment)
    return found


def _segments(search: IntervalSearch, worth: frozenset[int]) -> Iterator[Segment]:
    replay, tables = search.replay, search.tables
    graph = replay.graph
    reach = min(_REACH, tables.reach)
    for low in range(0, graph.size, reach):
        start = max(0, low - reach)
        window = Replays(replay, start, min(graph.size, low + reach), worth)
        trigger = -1
        for last in range(start, min(graph.size, low + reach)):
            if not graph.packs[last]:
                continue
            trigger = last if graph.reached[last] else trigger
            if last >= low:
                yield from _ending(search, window, worth, last, trigger)


def _ending(
    search: IntervalSearch, window: Replays, worth: frozenset[int], last: int, trigger: int
) -> Iterator[Segment]:
    """Yield the regions that end with an op that saves something, and hold something."""
    tables, stop = search.tables, last + 1
    found = window.ending(last, trigger, min(_REACH, tables.reach))
    outputs_bytes = tables.outputs_bytes
    for k in ((found.held > 0) & found.runs).nonzero()[0].tolist():
        start = found.low + k
        run = start, stop - start
        if not tables.allowed[run]:
            continue
        kept = window.kept_from(start, last)
        region = Region(start=start, stop=stop, kept=kept)
        if not keeps_in_step(region, search.replay.problem):
            continue
        held = int(found.held[k])
        forward = int(tables.region_forward[run]) + held
        yield Segment(
            start=start,
            region=region,
            keeps=int(tables.region_keeps[run]) + int(found.hidden[k]),
            needs=max(forward, int(found.needs[k]) + outputs_bytes),
            cost=int(found.costs[k]),
        )
