"""Ops in a region that its replay does not run: what they made is held.

An op that saves its own result (attention that never writes its scores, an exponential) has to
run again for that result wherever its inputs are made again. Kept, it need not: the replay makes
its inputs, and takes the rest from what forward left. Of an op that is kept while nobody wants
its result nothing is held: see ``idle``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from solvers.errors import PlanError
from solvers.problem import Problem

if TYPE_CHECKING:
    from solvers.plan import Region
    from solvers.replay import Replay


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


def worth_keeping(replay: Replay, rate: float) -> frozenset[int]:
    """Return ops of which a byte costs ``rate`` times what one of the whole forward does."""
    problem, graph = replay.problem, replay.graph
    room = replay.price(())[0] - replay.bases[0]

    def is_worth(index: int) -> bool:
        nbytes = sum(graph.nbytes[s] for s in held_for(problem, index))
        return problem.ops[index].cost * room >= rate * nbytes * replay.forward_cost

    return frozenset(index for index in replay.keepable if is_worth(index))


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


def check_kept(regions: Sequence[Region], problem: Problem) -> None:
    """Raise PlanError unless what the regions of a plan keep is well-formed."""
    if not any(inner.kept for region in regions for inner in region.walk()):
        return
    allowed = keepable_ops(problem)
    for region in regions:
        for inner in region.walk():
            where = f"What region [{inner.start}, {inner.stop}) keeps, {inner.kept},"
            if inner.kept and (inner.children or inner is not region):
                raise PlanError(
                    f"{where} is in a region with parent or children: only one with neither may "
                    f"keep ops."
                )
            if list(inner.kept) != sorted(set(inner.kept)) or not set(inner.kept) <= set(
                range(inner.start, inner.stop)
            ):
                raise PlanError(f"{where} is not a list of its ops in program order.")
            if not keeps_in_step(inner, problem):
                raise PlanError(
                    f"{where} has some of its ops that draw random numbers and not all: name all "
                    f"of them, or none."
                )
            wrong = [index for index in inner.kept if index not in allowed]
            if wrong:
                op = problem.ops[wrong[0]]
                raise PlanError(
                    f"{where} holds op {wrong[0]} ({op.target} at {op.source}), which cannot be "
                    f"kept apart from its neighbours."
                )
