"""The table of solvers, and the one way to call any of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType

from solvers import (
    auto,
    checkmate,
    chen_greedy,
    every_k,
    exhaustive,
    ilp,
    interval_dp,
    min_cut,
    none,
    rotor,
    sqrt_n,
    treeverse,
)
from solvers.errors import InfeasibleError, PlanError
from solvers.plan import Plan
from solvers.pricing import format_bytes, priced
from solvers.problem import Problem
from solvers.simulate import simulate
from solvers.steady import steady

Solver = Callable[[Problem, int], Plan]

SOLVERS: Mapping[str, Solver] = MappingProxyType(
    {
        "auto": auto.solve,
        "checkmate": checkmate.solve,
        "chen_greedy": chen_greedy.solve,
        "every_k": every_k.solve,
        "exhaustive": exhaustive.solve,
        "ilp": ilp.solve,
        "interval_dp": interval_dp.solve,
        "min_cut": min_cut.solve,
        "none": none.solve,
        "rotor": rotor.solve,
        "sqrt_n": sqrt_n.solve,
        "treeverse": treeverse.solve,
    }
)

_UNSWAYED = frozenset({"auto", "checkmate", "exhaustive", "ilp", "interval_dp", "none"})
"""Solvers that name the same least peak whatever the costs are."""


def solve(
    problem: Problem,
    budget_bytes: int,
    solver: str | Solver = "auto",
    *,
    seconds: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Plan a step within a budget.

    Parameters
    ----------
    problem : Problem
    budget_bytes : int
        Peak not to exceed, fixed bytes included.
    solver : str or callable
        A name in ``SOLVERS``, or any callable that takes a problem and a budget in bytes and
        returns a plan.
    seconds : float, optional
        Time limit of ``"auto"``, ``"ilp"`` (20 s by default) and ``"checkmate"`` (60 s by
        default): a plan that was found when it cut the search short has status ``"time limit"``.
        Where there is none by then they go on until one is found, ``"auto"`` as it does without
        a limit, the other two without their programs. Making a program counts, but neither that
        of ``"ilp"``, of at most 40 ops or a few hundred edges, nor a step of the backend is
        broken off in the middle. The other solvers are quick by themselves and take no limit.
    progress : callable, optional
        Told by ``"auto"`` what is tried, one line at a time.

    Returns
    -------
    Plan
        Well-formed, inside the budget, and priced by ``simulate``.

    Raises
    ------
    PlanError
        If there is no such solver, or what it returns is no plan, malformed or over budget.
    NoPlanFoundError, InfeasibleError
        If the solver found nothing that fits.

    Examples
    --------
    >>> from solvers.problem import Op, Storage, Value
    >>> problem = Problem(
    ...     ops=(Op(name="y", inputs=(0,), outputs=(1,)),),
    ...     values=(Value(storage=0), Value(storage=1)),
    ...     storages=(Storage(nbytes=8), Storage(nbytes=4, producer=0)),
    ...     outputs=(1,),
    ...     loss=1,
    ...     boundaries=(True, True),
    ...     batch_bytes=8,
    ... )
    >>> solve(problem, 12).recompute_cost
    0
    >>> solve(problem, 12, "magic")
    Traceback (most recent call last):
    ...
    solvers.errors.PlanError: There is no solver 'magic'. Use one of auto, checkmate, chen_greedy,
    every_k, exhaustive, ilp, interval_dp, min_cut, none, rotor, sqrt_n, treeverse, or a
    callable (problem, budget_bytes) -> Plan.
    """
    if solver == "auto":
        return auto.solve(problem, budget_bytes, seconds=seconds, progress=progress)
    if isinstance(solver, str) and solver in SOLVERS and problem.spans is not None:
        return _over_modules(problem, budget_bytes, solver)
    if solver == "ilp" and seconds is not None:
        return ilp.solve(problem, budget_bytes, seconds=seconds)
    if solver == "checkmate" and seconds is not None:
        return checkmate.solve(problem, budget_bytes, seconds=seconds)
    if isinstance(solver, str) and solver in SOLVERS:
        return _named(problem, budget_bytes, solver)
    if isinstance(solver, str) or not callable(solver):
        raise PlanError(
            f"There is no solver {solver!r}. Use one of {', '.join(SOLVERS)}, or a callable "
            f"(problem, budget_bytes) -> Plan."
        )
    return _checked(problem, budget_bytes, solver)


def _named(problem: Problem, budget_bytes: int, solver: str) -> Plan:
    """Call a solver, and where it fails once more with costs that do not change.

    So the least peak that its error names is one that it finds again after costs were measured
    anew.
    """
    call = SOLVERS[solver]
    if solver in _UNSWAYED:
        return call(problem, budget_bytes)
    started = time.perf_counter()
    with suppress(InfeasibleError):
        return call(problem, budget_bytes)
    plan = call(steady(problem), budget_bytes)
    return priced(problem, plan.regions, solver, budget_bytes, started)


def _over_modules(problem: Problem, budget_bytes: int, solver: str) -> Plan:
    if solver != "none":
        raise PlanError(
            f"solver={solver!r} plans runs of calls, and here regions are calls of modules "
            f"(Problem.spans). Use 'auto', 'none', or a callable (problem, budget_bytes) -> Plan."
        )
    return none.solve(problem, budget_bytes)


def _checked(problem: Problem, budget_bytes: int, solver: Solver) -> Plan:
    """Call a solver of the user's and believe nothing that it says about its plan."""
    name = getattr(solver, "__name__", type(solver).__name__)
    plan: object = solver(problem, budget_bytes)
    if not isinstance(plan, Plan):
        raise PlanError(
            f"solver {name!r} returned {type(plan).__name__}, not a solvers.Plan. Return "
            f"Plan.flat([(start, stop), ...])."
        )
    try:
        prediction = simulate(problem, plan)
    except PlanError as error:
        raise PlanError(f"solver {name!r} returned a plan that is malformed: {error}") from error
    if prediction.peak_bytes > budget_bytes:
        raise PlanError(
            f"solver {name!r} returned a plan whose peak is "
            f"{format_bytes(prediction.peak_bytes, up=True)}, over the budget of "
            f"{format_bytes(budget_bytes)}. Return a plan that fits, or raise "
            f"NoPlanFoundError."
        )
    return replace(
        plan,
        solver=name if plan.solver == "none" else plan.solver,
        budget_bytes=budget_bytes,
        peak_bytes=prediction.peak_bytes,
        recompute_cost=prediction.recompute_cost,
        signature=problem.signature,
    )
