"""Chen et al. 2016: close a segment as soon as it has made so many bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from solvers.judge.replay import Replay, replay_of
from solvers.plan import Plan, Region
from solvers.pricing import priced, require
from solvers.problem import Problem
from solvers.search.blocks import regions_over
from solvers.search.flat import search_of

_BUDGETS = 40
_SMALLEST_SHARE = 0.005


def solve(problem: Problem, budget_bytes: int) -> Plan:
    """Cut the op order into regions of a number of saved bytes; try many such numbers.

    Parameters
    ----------
    problem : Problem
    budget_bytes : int
        Peak not to exceed, fixed bytes included.

    Returns
    -------
    Plan
        Any graph, no guarantee; at most one forward more.

    Raises
    ------
    NoPlanFoundError, InfeasibleError
        If no number fits; ``minimum_bytes`` is the least peak of any.

    Notes
    -----
    Regions end where fewest bytes cross (the paper's candidate split points). O(40 n) time.

    References
    ----------
    T. Chen, B. Xu, C. Zhang, C. Guestrin, *Training Deep Nets with Sublinear Memory Cost*,
    2016, arXiv:1604.06174, algorithm 3 and section 4.4.

    Examples
    --------
    >>> from solvers.chains import equal_chain
    >>> problem = equal_chain(ops=16, input_bytes=4)
    >>> solve(problem, 64).recompute_cost < problem.forward_cost
    True
    """
    started = time.perf_counter()
    replay = replay_of(problem)

    def order(regions: tuple[Region, ...]) -> tuple[bool, int, int]:
        peak, cost = replay.price(regions)
        fits = peak <= budget_bytes
        return (not fits, cost, peak) if fits else (not fits, peak, cost)

    best = min(candidates(replay), key=order)
    plan = priced(problem, best, "chen_greedy", budget_bytes, started)
    return require(problem, plan, budget_bytes)


def candidates(replay: Replay) -> Iterator[tuple[Region, ...]]:
    """Yield the regions for each number of bytes, the plain step first."""
    yield ()
    made = saved_bytes(replay)
    splits = split_points(replay)
    total = sum(made)
    seen = set()
    for limit in np.geomspace(max(1.0, _SMALLEST_SHARE * total), max(1.0, total), _BUDGETS):
        regions = _greedy(replay.problem, made, splits, float(limit))
        if regions not in seen:
            seen.add(regions)
            yield regions


def _greedy(
    problem: Problem, made: list[int], splits: set[int], limit: float
) -> tuple[Region, ...]:
    regions: list[Region] = []
    start, filled = 0, 0
    for op, nbytes in enumerate(made):
        filled += nbytes
        if filled > limit and op + 1 in splits:
            regions += regions_over(problem, start, op + 1)
            start, filled = op + 1, 0
    # What comes last is needed at once: it stays outside.
    return tuple(regions)


def saved_bytes(replay: Replay) -> list[int]:
    """Return, per op, the bytes of those storages of its making that backward needs."""
    graph = replay.graph
    saved = {s for op, storages in enumerate(graph.saved) if graph.reached[op] for s in storages}
    return [sum(graph.nbytes[s] for s in made if s in saved) for made in graph.produced]


def split_points(replay: Replay) -> set[int]:
    """Return the allowed edges that no more bytes cross than either neighbouring one."""
    crossing = search_of(replay).tables.crossing
    edges = [i for i, allowed in enumerate(replay.problem.boundaries) if allowed]
    levels = [int(crossing[i]) for i in edges]
    return {
        edge
        for k, edge in enumerate(edges)
        if levels[k] <= min(levels[max(0, k - 1)], levels[min(len(edges) - 1, k + 1)])
    }
