"""Random prologues for regions of a plan."""

from __future__ import annotations

import random
from dataclasses import replace

from solvers.errors import PlanError
from solvers.judge.keeping import keepable_ops
from solvers.judge.prologue import reads_inside_others, repeatable_ops
from solvers.judge.wellformed import check_plan
from solvers.plan import Plan, Region
from solvers.problem import Problem


def with_random_prologues(problem: Problem, plan: Plan, rng: random.Random) -> Plan:
    """Give the regions without children prologues where their inputs can be made again."""
    allowed = repeatable_ops(problem)
    made_by = {v: i for i, op in enumerate(problem.ops) for v in op.outputs}
    regions = tuple(
        region if region.children else _with_prologue(problem, region, made_by, allowed, rng)
        for region in plan.regions
    )
    while bad := {region for region, _ in reads_inside_others(regions, problem)}:
        regions = tuple(replace(r, prologue=()) if r in bad else r for r in regions)
    return replace(plan, regions=regions)


def _with_prologue(
    problem: Problem,
    region: Region,
    made_by: dict[int, int],
    allowed: frozenset[int],
    rng: random.Random,
) -> Region:
    again: set[int] = set()
    pending = [v for op in problem.ops[region.start : region.stop] for v in op.inputs]
    while pending:
        index = made_by.get(pending.pop(), region.start)
        if index >= region.start or index in again or rng.random() < 0.3:
            continue
        if index in allowed:
            again.add(index)
            pending += problem.ops[index].inputs
    chosen = replace(region, prologue=tuple(sorted(again)))
    try:
        check_plan(Plan(regions=(chosen,)), problem)
    except PlanError:
        # A view of what it makes again is read that it does not take again.
        return region
    return chosen


def with_random_kept(problem: Problem, plan: Plan, rng: random.Random) -> Plan:
    """Let the regions without children keep some of their ops, and all of their draws or none."""
    allowed = keepable_ops(problem)

    def keeping(region: Region) -> Region:
        inside = range(region.start, region.stop)
        draws = {i for i in inside if problem.ops[i].random}
        kept = {i for i in inside if i in allowed - draws and rng.random() < 0.3}
        if draws <= allowed and rng.random() < 0.5:
            kept |= draws
        return replace(region, kept=tuple(sorted(kept)))

    regions = (region if region.children else keeping(region) for region in plan.regions)
    return replace(plan, regions=tuple(regions))
