"""The plan of least peak that can be found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from solvers import chen_greedy, every_k, min_cut, modules, treeverse
from solvers.bounds import peak_bound
from solvers.judge.replay import Replay, replay_of
from solvers.plan import Plan, Region
from solvers.pricing import priced
from solvers.problem import Problem
from solvers.rotor import chain_of
from solvers.search.flat import best_flat
from solvers.search.local import fitted
from solvers.search.nested import best_nested
from solvers.steady import steady

_FLAT_STEPS = 100
_NESTED_STEPS = 50
_LOWERING_STEPS = 200
_PRICES = 300
# Beyond, minimum cuts take half as long as all else here, and on no model were they the lowest.
_SMALL_OPS = 100
Regions = tuple[Region, ...]
Finder = Callable[[Replay, int], Regions | None]


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
    Begins with the lowest plan of the solvers that try a few out, ``min_cut`` up to 100 ops, and
    halves the interval between the bound and the best known until a fiftieth of the activation
    peak is left. Local search lowers what that gives.
    """
    if problem.spans is not None:
        return modules.least_peak(problem)
    started = time.perf_counter()
    replay = replay_of(steady(problem))
    if replay.least is None:
        nested = (treeverse.candidates(replay.problem), (chain_of(replay).least(),))
        start = _least(replay, (_least_flat(replay), _start(replay, nested)))
        replay.least = _lowered(replay, lowest(replay, best_nested, start, _NESTED_STEPS))
    peak = replay.price(replay.least)[0]
    return priced(problem, replay.least, "least_peak", peak, started)


def least_flat_peak(problem: Problem) -> Plan:
    """Return the plan of least peak among flat regions that is found.

    The same whatever the costs, as that of ``least_peak``.
    """
    started = time.perf_counter()
    replay = replay_of(steady(problem))
    flat = _least_flat(replay)
    return priced(problem, flat, "interval_dp", replay.price(flat)[0], started)


def _least_flat(replay: Replay) -> Regions:
    if replay.least_flat is None:
        ways: list[Iterable[Regions]] = [
            every_k.candidates(replay.problem),
            chen_greedy.candidates(replay),
        ]
        if replay.graph.size <= _SMALL_OPS:
            ways.append(min_cut.candidates(replay))
        flat = lowest(replay, best_flat, _start(replay, ways), _FLAT_STEPS)
        replay.least_flat = _lowered(replay, flat)
    return replay.least_flat


def _start(replay: Replay, ways: Iterable[Iterable[Regions]]) -> Regions:
    """Return the lowest regions of several ways."""
    found = [_least(replay, way) for way in ways]
    if replay.graph.size <= _SMALL_OPS:
        # Which of them is the lowest may change by that.
        found = [_lowered(replay, regions) for regions in found]
    return _least(replay, found)


def _least(replay: Replay, found: Iterable[Regions]) -> Regions:
    return min(found, key=replay.price, default=())


def _lowered(replay: Replay, regions: Regions) -> Regions:
    """Return regions changed for a lower peak, step by step as long as that succeeds."""
    step = max(1, (replay.price(regions)[0] - replay.bases[1]) // _LOWERING_STEPS)
    while True:
        lower = fitted(replay, regions, replay.price(regions)[0] - step, _PRICES)
        if lower is None:
            return regions
        regions = lower


def lowest(replay: Replay, find: Finder, best: Regions, steps: int) -> Regions:
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
