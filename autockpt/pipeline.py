"""One step, from the call to the program: capture, check, profile, lower, solve, rewrite."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autockpt.capture import Capture, Recorded, record
from autockpt.capture.check import check
from autockpt.errors import (
    BudgetError,
    CaptureError,
    InfeasibleError,
    NoPlanFoundError,
    PlanError,
    ProfileError,
)
from autockpt.lower import lower
from autockpt.profiler import device_of, profile
from autockpt.profiler.cost import CostChoice, cost_name
from autockpt.progress import progress
from autockpt.report import Report, make_report
from autockpt.rewrite import Program, rewrite
from autockpt.runtime.bypass import originals, unwatched
from autockpt.runtime.ranks import agree, bucket_bytes
from autockpt.settings import Loss, Settings, budget_for, margin_bytes
from autockpt.units import Budget, format_bytes, parse_budget
from solvers import bound, idle_ops, simulate, solve
from solvers.plan import Plan
from solvers.prediction import Prediction
from solvers.problem import Problem

T = TypeVar("T")

# One step is planned at a time: the meter of a CPU is one of the process.
PLANNING = threading.RLock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What earlier steps of the same module leave to a new one.

    Attributes
    ----------
    given : Plan or None
        The plan that the user asks for.
    plans : tuple of Plan
        One of them is carried over if it was made for the same stream of calls and fits.
    budget : Budget or None
        What the budget came to for the first step. A share is one of the step at hand, but
        never less than it was then: a last small batch needs no more recomputation.
    checked : frozenset of str
        Signatures of captures that were found equal to the model's forward.
    forms : mapping
        From signature to ``Profile.gradient_forms``.
    """

    given: Plan | None = None
    plans: tuple[Plan, ...] = ()
    budget: Budget | None = None
    checked: frozenset[str] = field(default=frozenset())
    forms: Mapping[str, dict[int, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A planned step: what all stages made of it.

    ``bucket_bytes`` are those of a DistributedDataParallel around it, which it was planned beside.
    """

    capture: Capture
    problem: Problem
    budget: Budget
    plan: Plan
    program: Program
    report: Report
    gradient_forms: dict[int, Any] | None
    bucket_bytes: int


def plan_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    known: Known,
) -> Step:
    """Record a step of the model and plan it.

    Parameters
    ----------
    model : nn.Module
        Its plain forward is run; it is left as it was.
    args, kwargs
        The batch.
    settings : Settings
    known : Known

    Raises
    ------
    CaptureError, ProfileError, BudgetError, InfeasibleError, PlanError

    Notes
    -----
    A stream of calls that is known costs one forward to record and one to profile, both
    without grad.
    """
    with PLANNING, originals(), unwatched():
        capture, recorded = record_step(model, args, kwargs, settings.loss)
        if capture.signature not in known.checked:
            with enough_memory("the recorded forward was checked against the model's"):
                check(capture, model, args, kwargs, rewrite(capture, Plan(), root=model).forward)
        closures = recorded.closures
        with enough_memory("the ops of the forward were measured"):
            profiled = profile(
                capture,
                model,
                args,
                kwargs,
                cost=settings.cost,
                closures=closures,
                forms=known.forms.get(capture.signature),
            )
    device = device_of(model, capture.inputs.tensors(args, kwargs))
    problem = lower(capture, profiled)
    plain = simulate(problem, Plan())
    buckets = bucket_bytes(model)
    budget = resolve_budget(settings, problem, plain, buckets)
    settings = replace(settings, reserve=settings.reserve + buckets)
    if known.budget is not None and known.budget.peak_bytes > budget.peak_bytes:
        budget = known.budget
    plan = choose_plan(settings, problem, budget, plain, known)
    idle = idle_ops(problem, plan)
    program = rewrite(capture, plan, root=model, random=random_ops(problem), idle=idle)
    report = make_report(
        problem,
        plan,
        simulate(problem, plan),
        plain,
        budget=budget,
        cost=cost_name(settings.cost, device.type),
        bound_cost=bound_cost(problem, plan, budget.peak_bytes - settings.reserve),
        notes=(*capture.notes, *_bucket_notes(buckets), *_meta_notes(device)),
    )
    return Step(
        capture=capture,
        problem=problem,
        budget=budget,
        plan=plan,
        program=program,
        report=report,
        gradient_forms=profiled.gradient_forms,
        bucket_bytes=buckets,
    )


def _bucket_notes(buckets: int) -> list[str]:
    if not buckets:
        return []
    return [
        f"DistributedDataParallel's buckets, a second copy of the gradients, take "
        f"{format_bytes(buckets)} of the budget, and are in no peak here. "
        f"gradient_as_bucket_view=True saves them."
    ]


def _meta_notes(device: torch.device) -> list[str]:
    if device.type != "meta":
        return []
    return [
        "Planned on meta, where no op shows what it needs while it runs, and attention is the "
        "composition that writes its scores: where training runs a fused kernel, it takes far less."
    ]


class ForwardError(CaptureError):
    """The model's own forward, or the loss, failed; its error is the cause."""


def lower_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss | None,
    cost: CostChoice = "roofline",
) -> tuple[Capture, Problem]:
    """Record and profile a step, without a check of the capture.

    Raises
    ------
    CaptureError, ProfileError
    """
    with PLANNING, originals(), unwatched():
        capture, recorded = record_step(model, args, kwargs, loss)
        closures = recorded.closures
        with enough_memory("the ops of the forward were measured"):
            profiled = profile(capture, model, args, kwargs, cost=cost, closures=closures)
    return capture, lower(capture, profiled)


def record_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss | None
) -> tuple[Capture, Recorded]:
    """Record, and tell the model's own errors from ours."""
    return run_step(record, model, args, kwargs, loss)


def run_step(
    look: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Loss | None], T],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss | None,
) -> T:
    """Call what runs the model's forward and loss, and tell the model's own errors from ours."""
    failing = f"{type(model).__name__}'s forward"

    def watched(outputs: Any) -> torch.Tensor:
        nonlocal failing
        failing = "The loss"
        assert loss is not None
        return loss(outputs)

    try:
        with enough_memory("the forward was recorded"):
            return look(model, args, kwargs, watched if loss is not None else None)
    except (CaptureError, ProfileError):
        raise
    except Exception as error:  # a model may raise anything
        own = "loss(model(*args, **kwargs))" if failing == "The loss" else "model(*args, **kwargs)"
        raise ForwardError(
            f"{failing} failed on this batch: {type(error).__name__}: {error}."
            f"{_devices(model, args, kwargs)} Call {own} to see it without autockpt."
        ) from error


@contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Say what needed more memory than there is."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _NO_CPU_MEMORY not in str(error):
            raise
        raise ProfileError(
            f"The device ran out of memory while {what}: that takes as much as a forward under "
            f"torch.no_grad() and its largest op. Shrink the batch; cost='roofline' measures "
            f"less, and a model and a batch on the meta device are planned without memory."
        ) from error


_NO_CPU_MEMORY = "DefaultCPUAllocator: can't allocate memory"


def _devices(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    own = {str(parameter.device) for parameter in model.parameters()}
    given = {
        str(leaf.device)
        for leaf in pytree.tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor)
    }
    if not own or not given - own:
        return ""
    return (
        f" The model is on {', '.join(sorted(own))}, the batch has tensors on "
        f"{', '.join(sorted(given - own))}: move them with .to(...)."
    )


def resolve_budget(
    settings: Settings, problem: Problem, plain: Prediction, buckets: int = 0
) -> Budget:
    """Turn the budget that was asked for into bytes."""
    parts = {
        "parameters": problem.parameter_bytes,
        "buffers": problem.buffer_bytes,
        "gradients": problem.gradient_bytes,
        "batch": problem.batch_bytes,
        "DistributedDataParallel's buckets": buckets,
    }
    return parse_budget(
        settings.memory_budget,
        problem.fixed_bytes + buckets,
        plain.activation_peak_bytes,
        parts=parts,
    )


def choose_plan(
    settings: Settings,
    problem: Problem,
    budget: Budget,
    plain: Prediction,
    known: Known,
) -> Plan:
    """Choose a plan for a budget: the given one, the plain step, a known plan, or a new one.

    Raises
    ------
    InfeasibleError
        Its message says how many bytes would do.
    PlanError
        The given plan, or the user's solver, is wrong.
    """
    whole = budget.peak_bytes - settings.reserve
    if settings.reserve and whole < problem.fixed_bytes:
        raise BudgetError(
            f"reserve={settings.reserve} ({format_bytes(settings.reserve)}) leaves "
            f"{format_bytes(max(0, whole))} of {budget}, and "
            f"{format_bytes(problem.fixed_bytes, round_up=True)} are fixed (parameters, gradients, "
            f"buffers, batch). Reserve less or raise memory_budget."
        )
    # The plain step keeps no margin, as there is no plan that would need less.
    target = whole - margin_bytes(budget.peak_bytes, problem.fixed_bytes)
    if known.given is not None:
        return _given(known.given, problem, budget, target if known.given.regions else whole)
    if plain.peak_bytes <= whole:
        return _priced(Plan(solver="none", status="optimal"), problem, budget.peak_bytes)
    for plan in known.plans:
        if plan.signature == problem.signature and _fits(plan, problem, target):
            return _priced(plan, problem, target)

    def solved(shared: Plan | None) -> Plan:
        if shared is not None and _fits(shared, problem, target):
            return _priced(shared, problem, target)
        return _solved(settings, problem, target)

    try:
        if not isinstance(settings.solver, str):
            return solved(None)
        return agree(_question(settings, problem, plain, target), solved)
    except InfeasibleError as error:
        raise _with_margin(error, settings, problem, budget, plain) from error


def _question(settings: Settings, problem: Problem, plain: Prediction, target: int) -> str:
    """Tell problems apart that are not to share a plan; measured times may differ."""
    asked = (settings.solver, settings.solve_seconds, str(settings.cost), target)
    return repr((problem.signature, problem.fixed_bytes, plain.peak_bytes, *asked))


def _solved(settings: Settings, problem: Problem, target: int) -> Plan:
    try:
        with progress() as say:
            return solve(
                problem, target, settings.solver, seconds=settings.solve_seconds, progress=say
            )
    except (InfeasibleError, PlanError, CaptureError):
        raise
    except Exception as error:
        if isinstance(settings.solver, str):
            raise
        name = getattr(settings.solver, "__name__", type(settings.solver).__name__)
        raise PlanError(
            f"solver {name!r} raised {type(error).__name__}: {error}. It is called as "
            f"solver(problem, budget_bytes) and returns a solvers.Plan."
        ) from error


def _given(plan: Plan, problem: Problem, budget: Budget, target: int) -> Plan:
    peak_bytes = simulate(problem, plan).peak_bytes
    if peak_bytes > target:
        raise PlanError(
            f"The given plan needs {format_bytes(peak_bytes, round_up=True)} here, more than the "
            f"{format_bytes(target)} that {budget} leaves after margin and reserve. Raise "
            f"memory_budget, or leave plan= out to plan anew."
        )
    return _priced(plan, problem, target)


def _fits(plan: Plan, problem: Problem, target: int) -> bool:
    try:
        return simulate(problem, plan).peak_bytes <= target
    except PlanError:  # of the same calls on other layouts: an op may write in place there
        return False


def bound_cost(problem: Problem, plan: Plan, budget_bytes: int) -> int:
    """Give the cost that no schedule can go below, where the plan costs anything."""
    return bound(problem, budget_bytes) if plan.recompute_cost else 0


def _priced(plan: Plan, problem: Problem, budget_bytes: int) -> Plan:
    prediction = simulate(problem, plan)
    return replace(
        plan,
        budget_bytes=budget_bytes,
        peak_bytes=prediction.peak_bytes,
        recompute_cost=prediction.recompute_cost,
        signature=problem.signature,
    )


def random_ops(problem: Problem) -> frozenset[int]:
    """Give the indices of the ops that draw random numbers."""
    return frozenset(index for index, op in enumerate(problem.ops) if op.random)


def _with_margin(
    error: InfeasibleError,
    settings: Settings,
    problem: Problem,
    budget: Budget,
    plain: Prediction,
) -> InfeasibleError:
    """Say the same of the budget that the user gave: margin and reserve come on top."""
    if error.minimum_bytes is None:
        return error
    least = budget_for(error.minimum_bytes, problem.fixed_bytes, settings.reserve)
    said = "No plan was found for" if isinstance(error, NoPlanFoundError) else "No plan fits"
    where = f", at {error.op}" if error.op else ""
    kept_free = format_bytes(settings.reserve)
    reserve = f" and {kept_free} for what is beside the model" if settings.reserve else ""
    margin = least - settings.reserve - error.minimum_bytes
    share = -(-100 * (least - problem.fixed_bytes) // plain.activation_peak_bytes)
    percent = f', "{share}%"' if budget.text.endswith("%") and share <= 100 else ""
    return type(error)(
        f"{said} {budget}: the least peak found is "
        f"{format_bytes(error.minimum_bytes, round_up=True)}{where}. Raise memory_budget to "
        f"{format_bytes(least, round_up=True)} ({least} bytes{percent}; {format_bytes(margin)} of "
        f"margin{reserve} included) or shrink the batch.",
        budget_bytes=budget.peak_bytes,
        minimum_bytes=least,
        bound_bytes=error.bound_bytes,
        op=error.op,
    )
