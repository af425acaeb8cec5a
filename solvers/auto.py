"""The portfolio: the best plan of several solvers, polished under the judge."""

from __future__ import annotations

import time
from collections.abc import Callable

from solvers import every_k, exhaustive, ilp
from solvers.bounds import bound
from solvers.errors import InfeasibleError
from solvers.interval_search import best_flat, search_of
from solvers.local import fitted, improve
from solvers.minimum import least_peak
from solvers.nested import best_nested
from solvers.plan import Plan, Region, Status
from solvers.pricing import priced, require
from solvers.problem import Problem
from solvers.replay import Replay, replay_of

_ASKED_SHARES = (1.005, 1.01, 1.02)
_PRICES = 800
_NESTING_SHARE = 0.7


def solve(
    problem: Problem, budget_bytes: int, *, progress: Callable[[str], None] | None = None
) -> Plan:
    """Return the cheapest plan found by any solver here.

    Parameters
    ----------
    problem : Problem
    budget_bytes : int
        Peak not to exceed, fixed bytes included.
    progress : callable, optional
        Told what is tried, one line at a time.

    Returns
    -------
    Plan
        Status ``"optimal"`` if its cost is 0 or meets the bound of every schedule.

    Raises
    ------
    InfeasibleError
        Below the peak of every schedule.
    NoPlanFoundError
        Above it, if nothing that fits was found; carries the least peak found.
    """
    started = time.perf_counter()
    say = progress or (lambda line: None)
    replay = replay_of(problem)
    if replay.price(())[0] <= budget_bytes:
        return priced(problem, (), "auto", budget_bytes, started, "optimal")
    found = _flat_candidates(replay, budget_bytes, say)
    best = _cheapest(replay, found, budget_bytes)
    if best is None or replay.price(best)[1] > _NESTING_SHARE * replay.forward_cost:
        say("regions inside regions")
        nested = best_nested(replay, budget_bytes)
        best = _cheapest(replay, [best, nested], budget_bytes)
    if best is None:
        say("the least peak")
        least = least_peak(problem)
        best = least.regions
        require(problem, priced(problem, best, "auto", budget_bytes, started), budget_bytes)
    say("local search")
    best = improve(replay, best, budget_bytes, _PRICES)
    status = _status(problem, replay.price(best)[1], budget_bytes)
    return priced(problem, best, "auto", budget_bytes, started, status)


def _flat_candidates(
    replay: Replay, budget_bytes: int, say: Callable[[str], None]
) -> list[tuple[Region, ...] | None]:
    problem = replay.problem
    say("one region per k blocks")
    found: list[tuple[Region, ...] | None] = [*every_k.candidates(problem)]
    if len(problem.ops) <= exhaustive.MOST_OPS:
        say("every flat plan")
        found += exhaustive.flat_plans(problem, 0)
        return found
    say("flat regions by dynamic programming")
    found.append(best_flat(replay, budget_bytes))
    room = budget_bytes - max(replay.bases)
    # The tables count a little too much: ask for more than there is, and let go of the excess.
    for share in _ASKED_SHARES:
        regions = search_of(replay).run(budget_bytes + int((share - 1) * room))
        if regions is not None:
            found.append(fitted(replay, regions, budget_bytes, _PRICES))
    if len(problem.ops) <= ilp.SMALL_OPS:
        say("flat regions by integer programming")
        try:
            found.append(ilp.solve(problem, budget_bytes).regions)
        except InfeasibleError:
            # Nested regions may still fit.
            found.append(None)
    return found


def _cheapest(
    replay: Replay, found: list[tuple[Region, ...] | None], budget_bytes: int
) -> tuple[Region, ...] | None:
    best: tuple[int, int, tuple[Region, ...]] | None = None
    for regions in found:
        if regions is None:
            continue
        peak, cost = replay.price(regions)
        if peak <= budget_bytes and (best is None or (cost, peak) < best[:2]):
            best = cost, peak, regions
    return None if best is None else best[2]


def _status(problem: Problem, cost: int, budget_bytes: int) -> Status:
    proven = cost == 0 or cost <= bound(problem, budget_bytes)
    return "optimal" if proven else "feasible"
