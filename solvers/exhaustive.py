"""Every flat plan: the tests' oracle."""

from __future__ import annotations

import time
from collections.abc import Iterator

from solvers.errors import PlanError
from solvers.judge.replay import replay_of
from solvers.plan import Plan, Region
from solvers.pricing import priced, require
from solvers.problem import Problem

MOST_OPS = 10


def solve(problem: Problem, budget_bytes: int) -> Plan:
    """Price every flat plan of a problem of at most ten ops and return the cheapest that fits.

    Parameters
    ----------
    problem : Problem
    budget_bytes : int
        Peak not to exceed, fixed bytes included.

    Returns
    -------
    Plan
        Optimal over flat regions. Of equally cheap plans the one of least peak.

    Raises
    ------
    PlanError
        If the problem has more ops.
    NoPlanFoundError, InfeasibleError
        If no flat plan fits; ``minimum_bytes`` is then exact for flat plans.

    Notes
    -----
    The number of plans grows 2.6-fold with every op: 10,946 at ten.
    """
    if len(problem.ops) > MOST_OPS:
        raise PlanError(
            f"solver 'exhaustive' prices every flat plan, of at most {MOST_OPS} ops; this "
            f"problem has {len(problem.ops)}. Use solver='ilp' or 'auto'."
        )
    started = time.perf_counter()
    replay = replay_of(problem)
    best: tuple[tuple[bool, int, int], tuple[Region, ...]] | None = None
    for regions in flat_plans(problem, 0):
        peak, cost = replay.price(regions)
        fits = peak <= budget_bytes
        order = (not fits, cost if fits else peak, peak if fits else cost)
        if best is None or order < best[0]:
            best = order, regions
    assert best is not None
    plan = priced(problem, best[1], "exhaustive", budget_bytes, started, "optimal")
    return require(problem, plan, budget_bytes)


def flat_plans(problem: Problem, position: int) -> Iterator[tuple[Region, ...]]:
    """Yield the regions of every well-formed flat plan from ``position`` on."""
    yield ()
    for start in range(position, len(problem.ops)):
        if not problem.boundaries[start]:
            continue
        for stop in range(start + 1, len(problem.ops) + 1):
            if problem.ops[stop - 1].pinned:
                break
            if problem.boundaries[stop]:
                for rest in flat_plans(problem, stop):
                    yield (Region(start=start, stop=stop), *rest)
