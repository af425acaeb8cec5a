"""From a budget as it was asked for to a plan that keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autockpt.errors import BudgetError, CaptureError, InfeasibleError, NoPlanFoundError, PlanError
from autockpt.meters import collector_off
from autockpt.progress import progress
from autockpt.runtime.ranks import agree
from autockpt.settings import Settings, budget_for, margin_bytes
from autockpt.units import Budget, format_bytes, parse_budget
from solvers import bound, simulate, solve
from solvers.plan import Plan
from solvers.prediction import Prediction
from solvers.problem import Problem


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
    *,
    given: Plan | None = None,
    known: Sequence[Plan] = (),
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
    target = room_bytes(budget, problem.fixed_bytes, settings.reserve)
    if given is not None:
        return _given(given, problem, budget, target if given.regions else whole)
    if plain.peak_bytes <= whole:
        return priced(Plan(solver="none", status="optimal"), problem, budget.peak_bytes)
    for plan in known:
        if plan.signature == problem.signature and _fits(plan, problem, target):
            return priced(plan, problem, target)

    def solved(shared: Plan | None) -> Plan:
        if shared is not None and _fits(shared, problem, target):
            return priced(shared, problem, target)
        return _solved(settings, problem, target)

    try:
        if not isinstance(settings.solver, str):
            return solved(None)
        return agree(_question(settings, problem, plain, target), solved)
    except InfeasibleError as error:
        raise _with_margin(error, settings, problem, budget, plain) from error


def room_bytes(budget: Budget, fixed_bytes: int, reserve: int) -> int:
    """Give what the peak of a plan must not exceed: the budget less reserve and margin."""
    return budget.peak_bytes - reserve - margin_bytes(budget.peak_bytes, fixed_bytes)


def _question(settings: Settings, problem: Problem, plain: Prediction, target: int) -> str:
    """Tell problems apart that are not to share a plan; measured times may differ."""
    asked = (settings.solver, settings.solve_seconds, str(settings.cost), target)
    return repr((problem.signature, problem.fixed_bytes, plain.peak_bytes, *asked))


def _solved(settings: Settings, problem: Problem, target: int) -> Plan:
    try:
        # A search makes millions of small objects and no cycles: to look for some takes time.
        with progress() as say, collector_off():
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
    return priced(plan, problem, target)


def _fits(plan: Plan, problem: Problem, target: int) -> bool:
    try:
        return simulate(problem, plan).peak_bytes <= target
    except PlanError:  # of the same calls on other layouts: an op may write in place there
        return False


def bound_cost(problem: Problem, plan: Plan, budget_bytes: int) -> int:
    """Give the cost that no schedule can go below, where the plan costs anything."""
    return bound(problem, budget_bytes) if plan.recompute_cost else 0


def priced(plan: Plan, problem: Problem, budget_bytes: int) -> Plan:
    """Write into a plan what it takes and what it was made for."""
    prediction = simulate(problem, plan)
    return replace(
        plan,
        budget_bytes=budget_bytes,
        peak_bytes=prediction.peak_bytes,
        recompute_cost=prediction.recompute_cost,
        signature=problem.signature,
    )


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
