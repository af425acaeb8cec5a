"""Ops in a region that its replay does not run: what they made is held.

An op that saves its own result (attention that never writes its scores, an exponential) has to
run again for that result wherever its inputs are made again. Kept, it need not: the replay makes
its inputs, and takes the rest from what forward left. Of an op that is kept while nobody wants
its result nothing is held: see ``idle``.
"""

from __future__ import annotations

from solvers.plan import Region
from solvers.problem import Problem

# What the kernels of one step hide beside their result: logarithms of sums, seeds, statistics.
_HIDDEN = 3


def keepable_ops(problem: Problem) -> frozenset[int]:
    """Return the ops that a region may keep.

    Not those that stay outside regions, nor those in a stretch that writes in place,
    that unpack several results, save statistics that they write, or make what autocast keeps;
    nor those that take a view, which would hold what they look at, nor those whose result the
    caller gets, and may write to before backward; nor ops of several steps, whose backward lets go
    of what they hide bit by bit, where what is kept stays.
    """
    given = {problem.values[v].storage for v in problem.outputs}
    casts = {problem.storages[s].producer for s in problem.forward_held}
    return frozenset(
        index
        for index, op in enumerate(problem.ops)
        if op.outputs
        and not (op.pinned or op.copied)
        and problem.boundaries[index]
        and problem.boundaries[index + 1]
        and index not in casts
        and len(op.outputs) == 1
        and problem.storages[problem.values[op.outputs[0]].storage].producer == index
        and problem.values[op.outputs[0]].storage not in given
        and len(held_for(problem, index)) <= 1 + _HIDDEN
    )


def held_for(problem: Problem, index: int) -> tuple[int, ...]:
    """Return the storages that are held for an op that is kept: its results, and what it hides."""
    op = problem.ops[index]
    shown = [problem.values[v].storage for v in op.outputs]
    own = (s for s in (*shown, *op.saved) if problem.storages[s].producer == index)
    return tuple(dict.fromkeys(own))


def draws_again(region: Region, problem: Problem) -> bool:
    """Tell whether the replay of a region draws random numbers, those of regions inside aside."""
    inside = range(region.start, region.stop)
    return any(problem.ops[i].random and i not in region.kept for i in inside)


def keeps_in_step(region: Region, problem: Problem) -> bool:
    """Tell whether a region keeps all or none of its draws.

    A draw that does not run again does not advance the generator: one after it would be given
    what was its.
    """
    kept = any(problem.ops[i].random for i in region.kept)
    return not (kept and draws_again(region, problem))
