"""Prologues: which ops a region may run again before its own, so as not to hold what they make.

A region holds its inputs. Where an input is cheap to make from others that are held anyway, as
the sum of a residual stream is from the two that it adds, its replay can run the op that made
it first: as if that op belonged to two regions.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from solvers.judge.graph import defining_ops
from solvers.plan import Region
from solvers.problem import Problem


def repeatable_ops(problem: Problem) -> frozenset[int]:
    """Return the ops that may be in a prologue: run again, apart from their neighbours.

    Not those that stay outside regions or draw, nor those in a stretch that writes in place,
    that unpack several results, save statistics that they write, or make what autocast keeps;
    nor those whose result another op hands on as its own.
    """
    kept = {problem.storages[s].producer for s in problem.forward_held}
    handed_on = {v for op in problem.ops if not op.outputs for v in op.inputs}
    return frozenset(
        index
        for index, op in enumerate(problem.ops)
        if op.outputs
        and not (op.pinned or op.random or op.copied)
        and problem.boundaries[index]
        and problem.boundaries[index + 1]
        and index not in kept
        and handed_on.isdisjoint(op.outputs)
    )


def reads_inside_others(
    regions: Sequence[Region],
    problem: Problem,
    definers: Sequence[int] | None = None,
    last: Sequence[int] | None = None,
) -> Iterator[tuple[Region, Region]]:
    """Yield regions whose prologue reads what lives inside another region only, and that one.

    ``definers`` and ``last`` are those of ``defining_ops`` and ``last_reads``, where they are
    at hand.
    """
    definers = defining_ops(problem) if definers is None else definers
    last = last_reads(problem) if last is None else last
    starts = [region.start for region in regions]
    for region in regions:
        for index in region.prologue:
            for value in problem.ops[index].inputs:
                definer = definers[value]
                if definer < 0 or definer in region.prologue:
                    continue
                other = regions[bisect.bisect_right(starts, definer) - 1]
                if other.start <= definer < other.stop and last[value] < other.stop:
                    yield region, other


def last_reads(problem: Problem) -> list[int]:
    """Return, per value, the last op that reads it; their number if the caller holds it."""
    last = [-1] * len(problem.values)
    for index, op in enumerate(problem.ops):
        for value in op.inputs:
            last[value] = index
    for value in (*problem.outputs, problem.loss):
        last[value] = len(problem.ops)
    return last


def unmade_views(region: Region, problem: Problem, index: int) -> list[int]:
    """Return values that an op reads of storages made again, and that are not made again."""
    made = {v for i in region.prologue for v in problem.ops[i].outputs}
    return [
        value
        for value in problem.ops[index].inputs
        if problem.storages[problem.values[value].storage].producer in region.prologue
        and value not in made
        and not any(value in problem.ops[i].outputs for i in range(region.start, region.stop))
    ]
