"""One step planned over calls of modules: observe, profile, lower, solve, check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from autockpt.capture import Capture
from autockpt.capture.restore import RandomState
from autockpt.choosing import bound_cost, choose_plan, resolve_budget, room_bytes
from autockpt.lower import lower
from autockpt.modules.check import differing
from autockpt.modules.naming import listing, plan_of, region_names, translated
from autockpt.modules.observe import Observation, drawn, observe
from autockpt.modules.run import Regions
from autockpt.modules.sharding import Stand, gathered_bytes, is_sharded, looked_at, of_a_rank
from autockpt.modules.spans import call_of, copied_bytes, regions_of, with_spans
from autockpt.pipeline import (
    PLANNING,
    Known,
    enough_memory,
    run_step,
)
from autockpt.profiler import device_of, profile
from autockpt.profiler.cost import CostChoice, cost_name
from autockpt.reports.layers import layer_pattern
from autockpt.reports.report import Report, make_report
from autockpt.runtime.bypass import originals, unwatched
from autockpt.runtime.ranks import bucket_bytes
from autockpt.settings import Loss, Settings
from autockpt.units import Budget, format_bytes
from solvers import InfeasibleError, least_peak, simulate
from solvers.plan import Plan
from solvers.problem import Problem

_MOST_CHECKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What stands in for emitted code where the model's own forward runs."""

    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleStep:
    """A planned step, as ``pipeline.Step``, of a model whose own Python runs.

    ``regions`` may hold calls that this step does not make, of others that run by the same plan;
    ``refused`` are modules that must not run again. Out of the budget, ``reserve`` is for others.
    """

    observed: Observation
    problem: Problem
    budget: Budget
    reserve: int
    plan: Plan
    program: Listing
    report: Report
    gradient_forms: dict[int, Any] | None
    bucket_bytes: int
    regions: Regions
    refused: frozenset[str] = frozenset()

    @property
    def capture(self) -> Capture:
        """The torch calls of the forward."""
        return self.observed.capture

    @property
    def room_bytes(self) -> int:
        """What the peak of a plan for this step must not exceed."""
        return room_bytes(self.budget, self.problem.fixed_bytes, self.reserve)


def plan_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    known: Known,
    notes: tuple[str, ...] = (),
    start: RandomState | None = None,
    beside: Sequence[ModuleStep] = (),
) -> ModuleStep:
    """Observe a step of the model and plan it over calls of its modules.

    Parameters
    ----------
    model : nn.Module
        Its submodules are of the classes of ``parts``.
    args, kwargs
        The batch.
    settings : Settings
    known : Known
    notes : tuple of str
        For the report.
    start : RandomState, optional
        Under which the forward is looked at; otherwise one is looked for that calls many modules.
    beside : sequence of ModuleStep
        Steps of the same shapes that call other modules. Training goes on from them: where
        nothing fits, the plan of least peak is given.

    Raises
    ------
    CaptureError, ProfileError, BudgetError, InfeasibleError, PlanError
    """
    with PLANNING, originals(), unwatched(), looked_at(model) as stand:
        observed, problem, forms = _observe(model, args, kwargs, settings, known, start, stand)
        whole = problem
        # Regions of others may be added to this plan later: so each call must do.
        everywhere = bool(beside)
        if everywhere:
            refused = {path: "" for step in beside for path in step.refused}
            problem = _without(problem, refused, alike=False)
            problem = _checked(model, args, kwargs, observed, problem)
        for number in range(_MOST_CHECKS):
            try:
                step = _solved(model, observed, problem, settings, known, notes, forms, beside)
            except InfeasibleError:
                # The least budget that is named must do: it counts on no module that is wrong.
                checked = (
                    problem if everywhere else _checked(model, args, kwargs, observed, problem)
                )
                if checked.spans == problem.spans:
                    raise
                everywhere, problem = True, checked
                continue
            wrong = _differing(model, args, kwargs, observed, step.regions)
            if not wrong:
                return replace(step, refused=_refused(observed, whole, problem))
            problem = _without(problem, wrong, alike=number >= _MOST_CHECKS // 2)
            if not everywhere:
                # Others would be found one after the other, each after a plan of its own.
                everywhere, problem = True, _checked(model, args, kwargs, observed, problem)
            found = (f"{path} {reason}: it does not run again." for path, reason in wrong.items())
            notes = tuple(dict.fromkeys((*notes, *found)))
        problem = replace(problem, spans=())
        step = _solved(model, observed, problem, settings, known, notes, forms, beside)
        return replace(step, refused=_refused(observed, whole, problem))


def _refused(observed: Observation, whole: Problem, left: Problem) -> frozenset[str]:
    """Name the modules whose calls must not run again: as was seen, and as was tried."""
    tried = {span.name for span in whole.spans or ()} - {span.name for span in left.spans or ()}
    forbidden = (observed.calls[index].path for index in observed.forbidden)
    return frozenset((*forbidden, *(call_of(name)[0] for name in tried)))


def lower_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss | None,
    cost: CostChoice = "roofline",
) -> tuple[Capture, Problem]:
    """Observe and profile a step; modules that may not run again are in no span."""
    settings = Settings(memory_budget="100%", loss=loss, cost=cost)
    with PLANNING, originals(), unwatched(), looked_at(model) as stand:
        observed, problem, _ = _observe(model, args, kwargs, settings, Known(), None, stand)
        problem = _checked(model, args, kwargs, observed, problem)
    return observed.capture, problem


def _observe(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    known: Known,
    start: RandomState | None,
    stand: Stand,
) -> tuple[Observation, Problem, dict[int, Any] | None]:
    observed = run_step(partial(observe, start=start), model, args, kwargs, settings.loss)
    capture = observed.capture
    with enough_memory("the ops of the forward were measured"), drawn(observed.start):
        profiled = profile(
            capture,
            model,
            args,
            kwargs,
            cost=settings.cost,
            closures=stand.beside(observed.closures),
            forms=known.forms.get(capture.signature),
        )
    problem = with_spans(lower(capture, profiled, undone=True), observed)
    # Copies of buffers stay from a region's beginning to its backward: they are buffers too.
    copied = copied_bytes(model, observed)
    problem = replace(problem, buffer_bytes=problem.buffer_bytes + copied)
    if is_sharded(model):
        problem = of_a_rank(problem, model)
    return observed, problem, profiled.gradient_forms


def _differing(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    observed: Observation,
    regions: Regions,
) -> dict[str, str]:
    """Find the regions that give other results when they run again."""
    what = "modules were run twice to compare the results"
    with enough_memory(what), drawn(observed.start):
        return differing(model, args, kwargs, regions)


def _checked(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    observed: Observation,
    problem: Problem,
) -> Problem:
    """Run all calls that may be regions twice, and take off those that must not be any."""
    every = {span.name for span in problem.spans or ()}
    regions = regions_of(model, [observed], every)
    return _without(problem, _differing(model, args, kwargs, observed, regions), alike=False)


def _without(problem: Problem, wrong: Mapping[str, str], *, alike: bool) -> Problem:
    """Take the calls of some modules, and of those like them, off those that may run again."""

    def place(path: str) -> str:
        return layer_pattern(path) if alike else path

    places = set(map(place, wrong))
    spans = problem.spans or ()
    kept = tuple(span for span in spans if place(call_of(span.name)[0]) not in places)
    return replace(problem, spans=kept)


def _solved(
    model: nn.Module,
    observed: Observation,
    problem: Problem,
    settings: Settings,
    known: Known,
    notes: tuple[str, ...],
    forms: dict[int, Any] | None,
    beside: Sequence[ModuleStep],
) -> ModuleStep:
    plain = simulate(problem, Plan())
    buckets, gathered = bucket_bytes(model), gathered_bytes(model)
    budget = resolve_budget(settings, problem, plain, buckets + gathered)
    settings = replace(settings, reserve=settings.reserve + buckets + gathered)
    if known.budget is not None and known.budget.peak_bytes > budget.peak_bytes:
        budget = known.budget
    known = _translated(known, problem, beside)
    try:
        plan = choose_plan(settings, problem, budget, plain, given=known.given, known=known.plans)
    except InfeasibleError:
        if not beside:
            raise
        plan = least_peak(problem)
    regions = regions_of(model, [observed], region_names(plan))
    return ModuleStep(
        # Tensors of others are not kept alive for it.
        observed=replace(observed, closures={}),
        problem=problem,
        budget=budget,
        reserve=settings.reserve,
        plan=plan,
        program=Listing(code=listing(plan)),
        report=report_of(
            problem,
            plan,
            budget,
            settings.reserve,
            cost=cost_name(settings.cost, device_of(model, ()).type),
            notes=(
                *notes,
                *observed.capture.notes,
                *_notes(regions, observed),
                *_gathered_notes(gathered),
            ),
        ),
        gradient_forms=forms,
        bucket_bytes=buckets,
        regions=regions,
    )


def report_of(
    problem: Problem, plan: Plan, budget: Budget, reserve: int, *, cost: str, notes: tuple[str, ...]
) -> Report:
    """Make the report of a plan over modules."""
    return make_report(
        problem,
        plan,
        simulate(problem, plan),
        simulate(problem, Plan()),
        budget=budget,
        cost=cost,
        bound_cost=bound_cost(problem, plan, budget.peak_bytes - reserve),
        notes=notes,
    )


def _notes(regions: Regions, observed: Observation) -> Iterator[str]:
    unseen = sorted(path for path in regions.calls if path not in observed.counts)
    if unseen:
        names = ", ".join(unseen[:4]) + (", ..." if len(unseen) > 4 else "")
        yield (
            f"{len(unseen)} modules were not called when this was planned ({names}): they run as "
            f"their neighbours do, and where that holds more, the regions are chosen anew."
        )


def _gathered_notes(gathered: int) -> Iterator[str]:
    if gathered:
        yield (
            f"FSDP's gathered parameters, their gradients and what is in transit take up to "
            f"{format_bytes(gathered)} of the budget, and are in no peak here."
        )


def _translated(known: Known, problem: Problem, beside: Sequence[ModuleStep]) -> Known:
    """Say plans that were made for other calls of the same modules in terms of this problem."""
    plans = [translated(plan, problem) for plan in known.plans]
    if beside:
        spans = problem.spans or ()
        held = {span.name for span in spans if beside[0].regions.holds(*call_of(span.name))}
        plans.insert(0, plan_of(held, problem))
    return replace(
        known,
        given=None if known.given is None else translated(known.given, problem),
        plans=tuple(plans),
    )
