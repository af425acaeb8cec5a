"""One set of regions for steps that call different modules.

Which kind of step it is shows only while it runs: regions must do for every kind that is known.
A call that a step does not make costs it nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from autockpt.choosing import priced
from autockpt.modules.naming import listing, plan_of, region_names
from autockpt.modules.spans import call_of, regions_of
from autockpt.modules.step import Listing, ModuleStep, report_of
from autockpt.units import format_bytes
from solvers import least_peak, simulate
from solvers.plan import Plan

Names = frozenset[str]


def together(model: nn.Module, steps: Sequence[ModuleStep]) -> tuple[ModuleStep, ...]:
    """Give steps of several kinds the same regions, so that each fits if that can be found.

    Parameters
    ----------
    model : nn.Module
    steps : sequence of ModuleStep
        Each with a plan of its own.

    Notes
    -----
    Taken are the regions of all kinds together; where a kind has no room for those of another
    (one more region can be one too many), some less; and at last those of the least peaks.
    """
    refused = frozenset[str]().union(*(step.refused for step in steps))
    steps = [_without(step, refused) for step in steps]
    best: tuple[int, Names] | None = None
    for names in _candidates(steps):
        over = max(_over_bytes(step, names) for step in steps)
        if best is None or over < best[0]:
            best = over, names
        if over <= 0:
            break
    assert best is not None
    over, names = best
    if over > 0:
        warnings.warn(
            f"{type(model).__name__} calls other modules in some steps than when it was planned, "
            f"and no regions were found with which all of them fit: up to "
            f"{format_bytes(over, round_up=True)} more than the memory_budget leaves room for may "
            f"be needed. Raise memory_budget by that, or shrink the batch.",
            stacklevel=2,
        )
    regions = regions_of(model, [step.observed for step in steps], names)
    return tuple(
        replace(_with_plan(step, plan_of(names, step.problem)), regions=regions) for step in steps
    )


def _without(step: ModuleStep, refused: frozenset[str]) -> ModuleStep:
    spans = step.problem.spans or ()
    kept = tuple(span for span in spans if call_of(span.name)[0] not in refused)
    return replace(step, problem=replace(step.problem, spans=kept))


def _candidates(steps: Sequence[ModuleStep]) -> Iterator[Names]:
    chosen = [region_names(plan_of(region_names(s.plan), s.problem)) for s in steps]
    every = frozenset[str]().union(*chosen)
    yield every
    for step, own in zip(steps, chosen, strict=True):
        counts = step.observed.counts
        others = (name for name in every if call_of(name)[1] >= counts.get(call_of(name)[0], 0))
        yield own.union(others)
    yield frozenset[str]().union(*(region_names(least_peak(step.problem)) for step in steps))


def _over_bytes(step: ModuleStep, names: Names) -> int:
    plan = plan_of(names, step.problem)
    margin = 0 if plan.regions else step.budget.peak_bytes - step.reserve - step.room_bytes
    return simulate(step.problem, plan).peak_bytes - step.room_bytes - margin


def _with_plan(step: ModuleStep, plan: Plan) -> ModuleStep:
    if plan.regions == step.plan.regions:
        return step
    plan = priced(plan, step.problem, step.room_bytes)
    return replace(
        step,
        plan=plan,
        program=Listing(code=listing(plan)),
        report=report_of(
            step.problem,
            plan,
            step.budget,
            step.reserve,
            cost=step.report.cost,
            notes=step.report.notes,
        ),
    )
