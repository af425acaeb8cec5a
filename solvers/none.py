"""The plain step."""

from __future__ import annotations

import time

from solvers.plan import Plan
from solvers.pricing import priced, require
from solvers.problem import Problem


def solve(problem: Problem, budget_bytes: int) -> Plan:
    """Return the plan without regions if it fits.

    Parameters
    ----------
    problem : Problem
    budget_bytes : int
        Peak not to exceed, fixed bytes included.

    Returns
    -------
    Plan
        Optimal, as it recomputes nothing.

    Raises
    ------
    NoPlanFoundError, InfeasibleError
        If the plain step does not fit.
    """
    plan = priced(problem, (), "none", budget_bytes, time.perf_counter(), "optimal")
    return require(problem, plan, budget_bytes)
