"""The plan of least peak that can be found."""

from __future__ import annotations

import time
from collections.abc import Callable

from solvers import modules
from solvers.bounds import peak_bound
from solvers.every_k import candidates
from solvers.judge.replay import Replay, replay_of
from solvers.plan import Plan, Region
from solvers.pricing import priced
from solvers.problem import Problem
from solvers.rotor import chain_of
from solvers.search.flat import best_flat
from solvers.search.nested import best_nested
from solvers.steady import steady

_FLAT_STEPS = 100
_NESTED_STEPS = 50
Finder = Callable[[Replay, int], tuple[Region, ...] | None]


def least_peak(problem: Problem) -> Plan:
    """Return the plan of least peak found, nested regions included.

    Parameters
    ----------
    problem : Problem

    Returns
    -------
    Plan
        No proof that nothing is lower; ``bounds.peak_bound`` says what cannot be. Found once
        per problem, and the same whatever the costs: they may be measured anew before somebody
        asks for a plan of that peak.

    Notes
    -----
    Halves the interval between the bound and the best known until a fiftieth of the
    activation peak is left.
    """
    if problem.spans is not None:
        return modules.least_peak(problem)
    started = time.perf_counter()
    replay = replay_of(steady(problem))
    if replay.least is None:
        known = ((), *candidates(replay.problem), chain_of(replay).least())
        start = min(known, key=lambda regions: replay.price(regions))
        flat = lowest(replay, best_flat, start, _FLAT_STEPS)
        replay.least = lowest(replay, best_nested, flat, _NESTED_STEPS)
    peak = replay.price(replay.least)[0]
    return priced(problem, replay.least, "least_peak", peak, started)


def least_flat_peak(problem: Problem) -> Plan:
    """Return the plan of least peak that the dynamic program over flat regions finds.

    The same whatever the costs, as that of ``least_peak``.
    """
    started = time.perf_counter()
    replay = replay_of(steady(problem))
    if replay.least_flat is None:
        replay.least_flat = lowest(replay, best_flat, (), _FLAT_STEPS)
    peak = replay.price(replay.least_flat)[0]
    return priced(problem, replay.least_flat, "interval_dp", peak, started)


def lowest(
    replay: Replay, find: Finder, best: tuple[Region, ...], steps: int
) -> tuple[Region, ...]:
    """Return the regions of least peak that ``find`` gives, or ``best`` if none is lower."""
    low, high = peak_bound(replay.problem), replay.price(best)[0]
    step = max(1, (high - replay.bases[1]) // steps)
    while high - low > step:
        middle = (low + high) // 2
        regions = find(replay, middle)
        if regions is None:
            low = middle
            continue
        best, high = regions, replay.price(regions)[0]
    return best
