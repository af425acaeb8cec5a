"""Plans with the judge's price on them, and the errors of plans over budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from solvers.bounds import peak_bound
from solvers.errors import InfeasibleError, NoPlanFoundError
from solvers.plan import Plan, Region, Status
from solvers.problem import Op, Problem
from solvers.simulate import simulate

_UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10))


def priced(
    problem: Problem,
    regions: tuple[Region, ...],
    solver: str,
    budget_bytes: int,
    started: float,
    status: Status = "feasible",
) -> Plan:
    """Return a plan of these regions with what the judge predicts for it."""
    prediction = simulate(problem, Plan(regions=regions))
    return Plan(
        regions=regions,
        solver=solver,
        status=status,
        budget_bytes=budget_bytes,
        peak_bytes=prediction.peak_bytes,
        recompute_cost=prediction.recompute_cost,
        solve_seconds=time.perf_counter() - started,
        signature=problem.signature,
    )


def require(
    problem: Problem,
    plan: Plan,
    budget_bytes: int,
    least: Callable[[Problem], Plan] | None = None,
) -> Plan:
    """Return ``plan`` if it fits; else raise, with the least peak that was found.

    Parameters
    ----------
    least : callable, optional
        Finds the plan of least peak; without it ``plan`` is taken to be that.
    """
    prediction = simulate(problem, plan)
    if prediction.peak_bytes <= budget_bytes:
        return plan
    if least is not None:
        prediction = simulate(problem, least(problem))
    bound_bytes = peak_bound(problem)
    where = describe_op(problem.ops[prediction.peak_op]) if problem.ops else "nowhere"
    minimum = prediction.peak_bytes
    name = f"solver {plan.solver!r}: " if plan.solver != "auto" else ""
    if budget_bytes < bound_bytes:
        raise InfeasibleError(
            f"{name}No plan fits {format_bytes(budget_bytes)}: no schedule of any kind needs "
            f"less than {format_bytes(bound_bytes, up=True)}, and the least peak found is "
            f"{format_bytes(minimum, up=True)}, at {where}. Raise memory_budget to "
            f"{format_bytes(minimum, up=True)} ({minimum} bytes) or shrink the batch.",
            budget_bytes=budget_bytes,
            minimum_bytes=minimum,
            bound_bytes=bound_bytes,
            op=where,
        )
    raise NoPlanFoundError(
        f"{name}None found that fits {format_bytes(budget_bytes)}: the least peak found is "
        f"{format_bytes(minimum, up=True)}, at {where}. Raise memory_budget to "
        f"{format_bytes(minimum, up=True)} ({minimum} bytes) or shrink the batch.",
        budget_bytes=budget_bytes,
        minimum_bytes=minimum,
        bound_bytes=bound_bytes,
        op=where,
    )


def describe_op(op: Op) -> str:
    """Return where an op is, as a user would look for it.

    Examples
    --------
    >>> describe_op(Op(name="addmm_3", module="blocks.3.attn", source="/x/modeling.py:251"))
    "'blocks.3.attn' (modeling.py:251)"
    """
    source = op.source.rsplit("/", 1)[-1]
    where = op.module or op.target or op.name
    return f"{where!r} ({source})" if source else repr(where)


def format_bytes(nbytes: int, *, up: bool = False) -> str:
    """Return bytes in the unit that reads best; ``up`` rounds so that as much is enough.

    Examples
    --------
    >>> format_bytes(3 << 29)
    '1.50 GiB'
    >>> format_bytes(1000)
    '1000 bytes'
    """
    for unit, shift in _UNITS:
        if nbytes >= 1 << shift:
            hundredths = nbytes * 100 / (1 << shift)
            rounded = math.ceil(hundredths) if up else round(hundredths)
            return f"{rounded / 100:.2f} {unit}"
    return f"{nbytes} bytes"
