"""One region per k blocks, what people write by hand."""

from __future__ import annotations

import time

from solvers.judge.replay import replay_of
from solvers.plan import Plan, Region
from solvers.pricing import priced, require
from solvers.problem import Problem
from solvers.search.blocks import blocks, grouped


def solve(problem: Problem, budget_bytes: int) -> Plan:
    """Put one region around every k consecutive blocks, for the cheapest k that fits.

    Parameters
    ----------
    problem : Problem
    budget_bytes : int
        Peak not to exceed, fixed bytes included.

    Returns
    -------
    Plan
        A baseline, no guarantee; no region where the plain step fits.

    Raises
    ------
    NoPlanFoundError, InfeasibleError
        If no k fits; ``minimum_bytes`` is the least peak of any k.

    Notes
    -----
    With b blocks and n ops: O(b n) time.
    """
    started = time.perf_counter()
    replay = replay_of(problem)

    def order(regions: tuple[Region, ...]) -> tuple[bool, int, int]:
        peak, cost = replay.price(regions)
        fits = peak <= budget_bytes
        return (not fits, cost, peak) if fits else (not fits, peak, cost)

    best = min(((), *candidates(problem)), key=order)
    return require(problem, priced(problem, best, "every_k", budget_bytes, started), budget_bytes)


def candidates(problem: Problem) -> list[tuple[Region, ...]]:
    """Return the regions of every k, the smallest first."""
    runs = blocks(problem)
    return [grouped(problem, runs, k) for k in range(1, len(runs) + 1)] or [()]
