"""The general rematerialization program (Jain et al. 2020): any op may run again at any time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Literal

import pulp

from solvers.bounds import bound, peak_bound
from solvers.errors import InfeasibleError, PlanError
from solvers.judge.replay import Replay, replay_of
from solvers.minimum import least_peak
from solvers.plan import Plan, Region, Status
from solvers.pricing import format_bytes, priced, require
from solvers.problem import Problem
from solvers.programs import run_program
from solvers.search.flat import best_flat
from solvers.search.local import Deadline, fitted, improve, tidied
from solvers.search.remat import OutOfTimeError, RematProgram, Step, cells, make_step

MOST_CELLS = 150_000
_SECONDS = 60.0
_SLACK = 1e-6
_PRICES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The least recomputation of any schedule at a budget, or of the program's relaxation.

    Attributes
    ----------
    budget_bytes : int
        Peak not to exceed, fixed bytes included.
    status : {"optimal", "relaxed", "time limit"}
        ``"relaxed"``: of the linear relaxation, a bound and no schedule.
    cost : int or None
        Recompute cost of the best schedule found, in the problem's unit; None if there is none
        (relaxed, or none found in time).
    bound : int
        A cost that no schedule of the class goes below; equals ``cost`` if optimal.
    runs : tuple of (int, int)
        Which ops run again, in order: at the turn of which op (its backward; its forward if it
        is the larger of the two), which op.
    kept : tuple of int
        Storages alive when backward starts, what the caller holds aside.
    solve_seconds : float
    """

    budget_bytes: int
    status: Literal["optimal", "relaxed", "time limit"]
    cost: int | None
    bound: int
    runs: tuple[tuple[int, int], ...] = ()
    kept: tuple[int, ...] = ()
    solve_seconds: float = 0.0


def best_schedule(
    problem: Problem, budget_bytes: int, *, relaxed: bool = False, seconds: float = _SECONDS
) -> Schedule:
    """Find the schedule of least recomputation, whether or not regions can express it.

    Parameters
    ----------
    problem : Problem
        Small: the program has about (ops squared) x storages variables.
    budget_bytes : int
        Peak not to exceed, fixed bytes included.
    relaxed : bool
        Solve the linear relaxation only: a bound, polynomial time, no limit.
    seconds : float
        Limit on the time of the integer program, making it included. It may be overrun by what
        it takes to hand the program to the backend, and to end a step of its search.

    Returns
    -------
    Schedule

    Raises
    ------
    InfeasibleError
        If no schedule of the class fits; then no plan of regions does.
    PlanError
        If the program would be too large.

    Notes
    -----
    The class: at the turn of each op, forward in program order and backward in reverse, earlier
    ops may run again, each at most once a turn and in program order, and anything may be let go
    at any time. Every plan of regions is such a schedule, so no plan of any solver here costs
    less. Where plans and schedules differ the program leaves out what costs memory, so that it
    stays below: a replay's random states, copies of running statistics and of what the caller
    holds, and arguments that a call holds longer than it reads them are not counted, casts of
    weights may go before forward ends, a storage written in place is back when its producer has
    run, ops that a plan must leave outside regions may run again. Gradients in flight are those
    of the judge: no schedule changes them. A run that stops where an op's last saved tensor is
    packed costs ``stop_cost``, and what it makes serves that op's backward alone.

    Exponential time in the worst case; a block of 56 ops takes seconds relaxed and from seconds
    to more than minutes as integers. Source: P. Jain et al., *Checkmate: breaking the memory wall
    with optimal tensor rematerialization*, MLSys 2020, section 4. Two things differ: presence is
    a variable per storage and instant, so that no product has to be made linear, and rows say
    of all turns after an instant together what holds of each, without which the relaxation runs
    a little of an op at every turn, from a little of its inputs.

    Examples
    --------
    >>> from solvers.chains import equal_chain
    >>> problem = equal_chain(ops=5, input_bytes=8, hidden_bytes=8)
    >>> found = best_schedule(problem, 56)
    >>> found.status, found.cost, found.bound
    ('optimal', 4, 4)
    >>> best_schedule(problem, 56, relaxed=True).bound <= found.bound
    True
    """
    started = time.perf_counter()
    replay = replay_of(problem)
    if replay.price(())[0] <= budget_bytes:
        return Schedule(budget_bytes=budget_bytes, status="optimal", cost=0, bound=0)
    if budget_bytes < peak_bound(problem):
        raise _infeasible(problem, budget_bytes)
    step = make_step(replay)
    if cells(step) > MOST_CELLS:
        raise PlanError(
            f"The rematerialization program of this problem ({len(problem.ops)} ops) has "
            f"{cells(step)} cells, more than the {MOST_CELLS} that can be hoped to be solved. "
            f"Use it on one block of the model; solvers.bound takes problems of any size."
        )
    if relaxed:
        found = _relaxed(replay, step, budget_bytes)
    else:
        found = _integer(replay, step, budget_bytes, Deadline.after(seconds))
    return replace(found, solve_seconds=time.perf_counter() - started)


def _relaxed(replay: Replay, step: Step, budget_bytes: int) -> Schedule:
    program = RematProgram(step, budget_bytes, relaxed=True)
    run_program(program.model)
    if program.model.status == pulp.LpStatusInfeasible:
        raise _infeasible(replay.problem, budget_bytes)
    bound = 0
    if program.model.sol_status == pulp.LpSolutionOptimal:
        bound = max(0, math.ceil(program.value() * (1 - _SLACK) - _SLACK))
    return Schedule(budget_bytes=budget_bytes, status="relaxed", cost=None, bound=bound)


def _integer(replay: Replay, step: Step, budget_bytes: int, deadline: Deadline) -> Schedule:
    found = Schedule(
        budget_bytes=budget_bytes,
        status="time limit",
        cost=None,
        bound=bound(replay.problem, budget_bytes),
    )
    try:
        program = RematProgram(step, budget_bytes, relaxed=False, deadline=deadline)
    except OutOfTimeError:
        return found
    run_program(program.model, seconds=deadline.left(), exact=True)
    if program.model.status == pulp.LpStatusInfeasible:
        raise _infeasible(replay.problem, budget_bytes)
    solutions = (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    if program.model.sol_status in solutions:
        runs, cost = program.runs()
        found = replace(found, cost=cost, runs=runs, kept=program.kept())
    if program.model.sol_status == pulp.LpSolutionOptimal:
        assert found.cost is not None
        return replace(found, status="optimal", bound=found.cost)
    # The backend's own bound is at least that of the relaxation, with which it begins.
    proven = program.proven_bound()
    return found if proven is None else replace(found, bound=max(found.bound, proven))


def _infeasible(problem: Problem, budget_bytes: int) -> InfeasibleError:
    return InfeasibleError(
        f"No schedule fits {format_bytes(budget_bytes)}: whatever runs again, and however often.",
        budget_bytes=budget_bytes,
        bound_bytes=peak_bound(problem),
    )


def solve(problem: Problem, budget_bytes: int, *, seconds: float = _SECONDS) -> Plan:
    """Round the best schedule to regions.

    Parameters
    ----------
    problem : Problem
        Small, see ``best_schedule``.
    budget_bytes : int
        Peak not to exceed, fixed bytes included.
    seconds : float
        Limit on all of it: making the program, solving it, and rounding. Where nothing that
        fits was found by then, the search goes on until something is, which is quick.

    Returns
    -------
    Plan
        Status ``"optimal"`` if it costs what the best schedule costs: then no plan of any kind
        is cheaper. ``"time limit"`` if the schedule was not solved to the end.

    Raises
    ------
    InfeasibleError
        If no schedule fits.
    NoPlanFoundError
        If one does, and rounding it gave no regions that fit.
    PlanError
        If the program would be too large.

    Notes
    -----
    A region is a run of ops that the schedule runs again, or of which it drops what they saved,
    cut where it keeps a storage. Small changes make that fit, and the judge says whether it is
    cheaper than the regions of ``interval_dp``. Rounding has no guarantee of its own: the
    schedule is there to prove what it can.

    Examples
    --------
    >>> from solvers.chains import equal_chain
    >>> plan = solve(equal_chain(ops=5, input_bytes=8, hidden_bytes=8), 56)
    >>> plan.recompute_cost, plan.status
    (4, 'optimal')
    """
    started = time.perf_counter()
    replay, deadline = replay_of(problem), Deadline.after(seconds)
    try:
        schedule = best_schedule(problem, budget_bytes, seconds=seconds)
    except InfeasibleError:
        # The least peak is named, and taken where the backend's tolerances hid it.
        plan = priced(problem, least_peak(problem).regions, "checkmate", budget_bytes, started)
        return require(problem, plan, budget_bytes)
    best: tuple[Region, ...] | None = None
    for regions in _candidates(replay, schedule):
        fitting = fitted(replay, regions, budget_bytes, _PRICES)
        if fitting is None:
            continue
        better = improve(replay, fitting, budget_bytes, _PRICES, deadline)
        better = tidied(replay, better, budget_bytes)
        if best is None or replay.price(better)[1] < replay.price(best)[1]:
            best = better
    if best is None:
        # What the error names as the least peak is found when it is then asked for.
        best = least_peak(problem).regions
    status: Status = "time limit" if schedule.status == "time limit" else "feasible"
    if replay.price(best)[1] <= schedule.bound:
        status = "optimal"
    plan = priced(problem, best, "checkmate", budget_bytes, started, status)
    return require(problem, plan, budget_bytes)


def _candidates(replay: Replay, schedule: Schedule) -> list[tuple[Region, ...]]:
    """Return ways to write a schedule as regions: cut where something is kept, and not.

    The last are the flat dynamic program's, for schedules that regions come nowhere near.
    """
    graph, problem = replay.graph, replay.problem
    kept = {*schedule.kept, *graph.outputs}
    again = {op for _, op in schedule.runs}
    inside = [
        not op.pinned
        and (i in again or not graph.produced[i] or any(s not in kept for s in graph.saved[i]))
        for i, op in enumerate(problem.ops)
    ]
    found = []
    for cut in (False, True):
        cuts = [cut and any(s in kept for s in graph.produced[i]) for i in range(graph.size)]
        regions, start = [], 0
        for i in range(graph.size + 1):
            ends = i == graph.size or not inside[i]
            if ends or (i and cuts[i - 1]):
                regions += _region(replay, start, i)
                start = i + 1 if ends else i
        found.append(tuple(regions))
    return [*found, best_flat(replay, schedule.budget_bytes) or ()]


def _region(replay: Replay, start: int, stop: int) -> list[Region]:
    """Return the region between two positions, moved inwards to where one may begin and end."""
    boundaries, packs = replay.problem.boundaries, replay.graph.packs
    while start < stop and not boundaries[start]:
        start += 1
    while start < stop and not (boundaries[stop] and packs[stop - 1]):
        stop -= 1
    return [Region(start=start, stop=stop)] if start < stop else []
