"""Best flat regions over the op order, by dynamic programming."""

from __future__ import annotations

import time

from solvers.judge.replay import replay_of
from solvers.minimum import least_flat_peak
from solvers.plan import Plan
from solvers.pricing import priced, require
from solvers.problem import Problem
from solvers.search.flat import best_flat


def solve(problem: Problem, budget_bytes: int) -> Plan:
    """Plan flat regions by dynamic programming over the op order.

    Parameters
    ----------
    problem : Problem
    budget_bytes : int
        Peak not to exceed, fixed bytes included.

    Returns
    -------
    Plan
        Status ``"feasible"``: near the best flat regions, not proven.

    Raises
    ------
    NoPlanFoundError, InfeasibleError
        If nothing that fits was found, or nothing can exist.

    Notes
    -----
    Segments are regions of at most 160 ops or runs of ops outside regions. With n ops, e edges
    into a position and 1024 labels: O(1024 n e) time, O(n^2) memory.
    """
    started = time.perf_counter()
    replay = replay_of(problem)
    regions = best_flat(replay, budget_bytes)
    if regions is None:
        # What the error names as the least peak is found when it is then asked for.
        regions = least_flat_peak(problem).regions
    plan = priced(problem, regions, "interval_dp", budget_bytes, started)
    return require(problem, plan, budget_bytes)
