"""Regions that keep some of their ops, offered to the search over intervals."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from solvers.judge.keeping import held_for
from solvers.judge.replay import Replay
from solvers.plan import Region
from solvers.search.interval_search import IntervalSearch, Segment
from solvers.search.replay_tables import Replays

_REACH = 128
# From an eighth to sixteen times what a byte of the whole forward costs.
RATES = tuple(2.0**power for power in range(-3, 5))


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
    chosen = np.flatnonzero((found.held > 0) & found.runs)
    starts = found.low + chosen
    held_here = window.kept_until(found.low, last)
    fine = tables.allowed[starts, stop - starts] & _in_step(search, held_here, starts, last)
    starts, chosen = starts[fine], chosen[fine]
    run = starts, stop - starts
    keeps = tables.region_keeps[run] + found.hidden[chosen]
    forward = tables.region_forward[run] + found.held[chosen]
    needs = np.maximum(forward, found.needs[chosen] + tables.outputs_bytes)
    first = np.searchsorted(held_here, starts)
    kept = {k: tuple(held_here[k:].tolist()) for k in np.unique(first).tolist()}
    columns = (starts, first, keeps, needs, found.costs[chosen])
    for start, k, kept_bytes, needed, cost in zip(*(c.tolist() for c in columns), strict=True):
        region = Region(start=start, stop=stop, kept=kept[k])
        yield Segment(start=start, region=region, keeps=kept_bytes, needs=needed, cost=cost)


def _in_step(
    search: IntervalSearch, kept: NDArray[np.intp], starts: NDArray[np.intp], last: int
) -> NDArray[np.bool_]:
    """Tell which regions keep all or none of their draws, see ``keeps_in_step``."""
    ops = search.replay.problem.ops
    low = int(starts.min(initial=last))
    draws = np.array([i for i in range(low, last + 1) if ops[i].random], np.intp)
    is_kept = np.isin(draws, kept)
    last_kept = draws[is_kept].max(initial=-1)
    last_again = draws[~is_kept].max(initial=-1)
    in_step: NDArray[np.bool_] = (last_kept < starts) | (last_again < starts)
    return in_step


def worth_keeping(replay: Replay, rate: float) -> frozenset[int]:
    """Return ops of which a byte costs ``rate`` times what one of the whole forward does."""
    problem, graph = replay.problem, replay.graph
    room = replay.plain_room

    def is_worth(index: int) -> bool:
        nbytes = sum(graph.nbytes[s] for s in held_for(problem, index))
        return problem.ops[index].cost * room >= rate * nbytes * replay.forward_cost

    return frozenset(index for index in replay.keepable if is_worth(index))
