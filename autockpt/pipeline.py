"""One step, from the call to the program: capture, check, profile, lower, solve, rewrite."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autockpt.before_guards import with_copies
from autockpt.capture import Capture, Recorded, record
from autockpt.capture.check import check
from autockpt.choosing import bound_cost, choose_plan, resolve_budget
from autockpt.errors import CaptureError, ForwardError, ProfileError
from autockpt.lower import lower, op_nodes
from autockpt.profiler import device_of, profile
from autockpt.profiler.cost import CostChoice, cost_name, cost_on
from autockpt.reports.report import Report, make_report
from autockpt.rewrite import Program, rewrite
from autockpt.runtime.bypass import originals, unwatched
from autockpt.runtime.ranks import bucket_bytes
from autockpt.settings import Loss, Settings
from autockpt.units import Budget, format_bytes
from solvers import idle_ops, simulate
from solvers.plan import Plan
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
        capture, recorded = record_step(model, args, kwargs, settings.loss, settings.cost)
        if capture.signature not in known.checked:
            with enough_memory("the recorded forward was checked against the model's"):
                program = rewrite(capture, Plan(), root=model, apart=True)
                check(capture, model, args, kwargs, program.forward)
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
    problem = with_copies(capture, problem)
    buckets = bucket_bytes(model)
    budget = resolve_budget(settings, problem, plain, buckets)
    settings = replace(settings, reserve=settings.reserve + buckets)
    if known.budget is not None and known.budget.peak_bytes > budget.peak_bytes:
        budget = known.budget
    plan = choose_plan(settings, problem, budget, plain, given=known.given, known=known.plans)
    idle = idle_ops(problem, plan)
    program = rewrite(
        capture,
        plan,
        root=model,
        random=random_ops(problem),
        idle=idle,
        saving=saving_ops(problem),
    )
    if plan.regions and shares_casts(capture):
        what = "the emitted forward was checked against the model's"
        with PLANNING, originals(), unwatched(), enough_memory(what):
            check(capture, model, args, kwargs, program.forward)
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


def lower_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss | None,
    cost: CostChoice = "roofline",
    *,
    timed: bool = True,
) -> tuple[Capture, Problem]:
    """Record and profile a step, without a check of the capture.

    With ``timed`` false the graph is the one for ``cost``, and costs are of the roofline.

    Raises
    ------
    CaptureError, ProfileError
    """
    with PLANNING, originals(), unwatched():
        capture, recorded = record_step(model, args, kwargs, loss, cost)
        closures = recorded.closures
        with enough_memory("the ops of the forward were measured"):
            counted = cost if timed else "roofline"
            profiled = profile(capture, model, args, kwargs, cost=counted, closures=closures)
    return capture, lower(capture, profiled)


def record_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss | None,
    cost: CostChoice,
) -> tuple[Capture, Recorded]:
    """Record for a cost, and tell the model's own errors from ours.

    The roofline takes a draw for as cheap as a sum: for it dropout stays one op, not three.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    device = device_of(model, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    apart = cost_on(cost, device.type) != "roofline"
    return run_step(partial(record, apart=apart), model, args, kwargs, loss)


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


def shares_casts(capture: Capture) -> bool:
    """Tell whether autocast inside the forward casts a tensor of the module for several uses.

    Then gradients of the uses are added up before the cast, in the lower precision, if one block
    of the emitted code holds them all: that is checked with the plan's regions in it.
    """
    uses: Counter[str] = Counter()
    for node in op_nodes(capture.graph):
        ambient = node.meta["ambient"]
        if ambient.autocast != capture.ambient.autocast and any(
            s.enabled for s in ambient.autocast
        ):
            uses.update({str(n.target) for n in node.all_input_nodes if n.op == "get_attr"})
    return any(count > 1 for count in uses.values())


def saving_ops(problem: Problem) -> frozenset[int]:
    """Give the indices of the ops that autograd saves something for."""
    return frozenset(index for index, op in enumerate(problem.ops) if op.packs)


def random_ops(problem: Problem) -> frozenset[int]:
    """Give the indices of the ops that draw random numbers."""
    return frozenset(index for index, op in enumerate(problem.ops) if op.random)
