"""Chen et al. 2016: the square root of n regions over n blocks."""

from __future__ import annotations

import math
import time

from solvers.judge.replay import replay_of
from solvers.plan import Plan
from solvers.pricing import priced, require
from solvers.problem import Problem
from solvers.search.blocks import blocks, grouped


def solve(problem: Problem, budget_bytes: int) -> Plan:
    """Put regions of about sqrt(n) consecutive blocks around all n blocks.

    Parameters
    ----------
    problem : Problem
    budget_bytes : int
        Peak not to exceed, fixed bytes included.

    Returns
    -------
    Plan
        A baseline: O(sqrt n) memory on a chain of equal blocks, at most one more forward; no
        region where the plain step fits.

    Raises
    ------
    NoPlanFoundError, InfeasibleError
        If that one plan does not fit.

    References
    ----------
    T. Chen, B. Xu, C. Zhang, C. Guestrin, *Training Deep Nets with Sublinear Memory Cost*,
    2016, arXiv:1604.06174.
    """
    started = time.perf_counter()
    runs = blocks(problem)
    fits = replay_of(problem).price(())[0] <= budget_bytes
    regions = () if fits or not runs else grouped(problem, runs, max(1, math.isqrt(len(runs))))
    return require(problem, priced(problem, regions, "sqrt_n", budget_bytes, started), budget_bytes)
