"""The best flat regions that the judge lets pass: one search a problem, asked again and again."""

from __future__ import annotations

from solvers.judge.replay import Replay
from solvers.plan import Region
from solvers.search.interval_search import ALL_OPS, LABELS, IntervalSearch, Offered
from solvers.search.intervals import make_intervals
from solvers.search.positions import positions_of

_TRIES = 4


def search_of(replay: Replay, most_ops: int = ALL_OPS) -> IntervalSearch:
    """Return the search of a problem, made once as long as it is kept.

    Parameters
    ----------
    replay : Replay
    most_ops : int
        Problems of more ops are searched over the edges that pay in their repeated blocks.
    """
    most_ops = min(most_ops, replay.graph.size)
    found = replay.searches.get(most_ops)
    if found is None:
        others = [s.tables for s in replay.searches.values() if isinstance(s, IntervalSearch)]
        tables = others[0] if others else make_intervals(replay)
        found = IntervalSearch(replay, tables, positions_of(replay, tables, most_ops))
        replay.searches[most_ops] = found
    assert isinstance(found, IntervalSearch)
    return found


def best_flat(
    replay: Replay, budget_bytes: int, offered: Offered | None = None, *, dearer: float = 1.0
) -> tuple[Region, ...] | None:
    """Return the cheapest flat regions found that the judge lets pass, or None.

    The tables differ from the judge by little; the budget they are asked for is moved until
    what they give is just inside the real one.
    """
    search = search_of(replay)
    asked = budget_bytes
    for _ in range(_TRIES):
        regions = search.run(asked, offered, dearer=dearer)
        if regions is None:
            return None
        peak, _ = replay.price(regions)
        if peak <= budget_bytes:
            return without_idle(replay, regions, budget_bytes)
        asked -= max(peak - budget_bytes, (budget_bytes - replay.bases[1]) // LABELS)
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
