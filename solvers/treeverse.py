"""Griewank and Walther's binomial checkpointing over blocks, as nested regions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from solvers.judge.replay import replay_of
from solvers.plan import Plan, Region
from solvers.pricing import priced, require
from solvers.problem import Problem
from solvers.search.blocks import regions_over
from solvers.search.stages import stage_edges

Stage = tuple[int, int]


def solve(problem: Problem, budget_bytes: int) -> Plan:
    """Nest regions over the blocks by the binomial schedule of as many checkpoints as fit.

    Parameters
    ----------
    problem : Problem
    budget_bytes : int
        Peak not to exceed, fixed bytes included.

    Returns
    -------
    Plan
        Least recomputation for a number of checkpoints, if the blocks are equal and only one
        of them is held in full at a time. Of blocks with ops that have to stay outside regions
        the longest run without any is taken.

    Raises
    ------
    NoPlanFoundError, InfeasibleError
        If the schedule of no number of checkpoints fits.

    Notes
    -----
    Blocks are the stages of ``stages.stage_edges``. With b of them: b schedules, O(b^3) time.

    References
    ----------
    A. Griewank, A. Walther, *Algorithm 799: revolve*, 2000, doi:10.1145/347837.347846.

    Examples
    --------
    >>> from solvers.chains import equal_chain
    >>> problem = equal_chain(ops=16, input_bytes=1, hidden_bytes=100)
    >>> plan = solve(problem, 120)
    >>> plan.recompute_cost <= problem.forward_cost * 2
    True
    """
    started = time.perf_counter()
    replay = replay_of(problem)

    def order(regions: tuple[Region, ...]) -> tuple[bool, int, int]:
        peak, cost = replay.price(regions)
        fits = peak <= budget_bytes
        return (not fits, cost, peak) if fits else (not fits, peak, cost)

    best = min(((), *candidates(problem)), key=order)
    plan = priced(problem, best, "treeverse", budget_bytes, started)
    return require(problem, plan, budget_bytes)


def candidates(problem: Problem) -> Iterator[tuple[Region, ...]]:
    """Yield the regions of the binomial schedule for every number of checkpoints."""
    stages = _stages(problem)
    for checkpoints in range(max(1, len(stages))):
        yield tuple(_nested(stages, checkpoints)) if stages else ()


def _stages(problem: Problem) -> tuple[Stage, ...]:
    """Return the longest run of stages that may be inside regions."""
    best: tuple[Stage, ...] = ()
    run: tuple[Stage, ...] = ()
    for start, stop in pairwise(stage_edges(replay_of(problem))):
        inside = regions_over(problem, start, stop) == [Region(start=start, stop=stop)]
        run = (*run, (start, stop)) if inside else ()
        best = max(best, run, key=len)
    return best


def replays(length: int, checkpoints: int) -> int:
    """Return how many blocks run again when ``length`` of them are reversed.

    ``checkpoints`` may be held besides the first input and the block at hand; the first forward
    does not count.

    Examples
    --------
    >>> replays(3, 0), replays(3, 1), replays(3, 2)
    (3, 2, 2)
    """
    return _schedule(length, checkpoints)[0]


@cache
def _schedule(length: int, checkpoints: int) -> tuple[int, int]:
    """Return how many blocks run again, and how many the first region holds."""
    if length == 1:
        return 0, 0
    shortest = 1 if checkpoints else length - 1
    return min(
        (cut + _schedule(cut, checkpoints)[0] + _schedule(length - cut, checkpoints - 1)[0], cut)
        for cut in range(shortest, length)
    )


def _nested(stages: tuple[Stage, ...], checkpoints: int) -> Iterator[Region]:
    _, cut = _schedule(len(stages), checkpoints)
    if not cut:
        return
    first, rest = stages[:cut], stages[cut:]
    children = tuple(_nested(first, checkpoints))
    yield Region(start=first[0][0], stop=first[-1][1], children=children)
    yield from _nested(rest, checkpoints - 1)
