"""The rematerialization program against every schedule of small problems."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import (
    InfeasibleError,
    NoPlanFoundError,
    Plan,
    PlanError,
    best_schedule,
    bound,
    peak_bound,
    simulate,
    solve,
)
from solvers.chains import equal_chain
from tests.solvers.checker import check
from tests.solvers.models import gpt2
from tests.solvers.problems import plans
from tests.solvers.schedules import Schedules, least_cost
from tests.solvers.tight import SMALL, budgets, detour


def schedule_cost(problem, budget):
    try:
        found = best_schedule(problem, budget)
    except InfeasibleError:
        return None
    assert found.status == "optimal"
    assert found.cost == found.bound
    return found.cost


@settings(max_examples=60, deadline=None)
@given(SMALL)
def test_it_is_the_least_cost_of_any_schedule(problem):
    """Equal to the least of its class, which all schedules together may be below."""
    ordered, free = Schedules(problem, ordered=True), Schedules(problem)
    for budget in budgets(problem, 4):
        found = schedule_cost(problem, budget)
        assert found == ordered.least_cost(budget)
        least = free.least_cost(budget)
        assert found is None or least <= found


@settings(max_examples=60, deadline=None)
@given(SMALL)
def test_the_relaxation_is_below_and_above_the_bound(problem):
    for budget in budgets(problem, 4):
        cost = schedule_cost(problem, budget)
        if cost is not None:
            relaxed = best_schedule(problem, budget, relaxed=True)
            assert relaxed.status in ("relaxed", "optimal")
            assert bound(problem, budget) <= relaxed.bound <= cost


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_plan_costs_less(data):
    problem = data.draw(SMALL)
    plan = data.draw(plans(problem))
    resident, fresh, cost, _ = check(problem, plan)
    least = schedule_cost(problem, max(resident, fresh))
    assert least is not None
    assert least <= cost


def test_making_an_op_twice_in_one_turn_is_outside_its_class():
    problem = detour()
    costs = {
        budget: (
            least_cost(problem, budget),
            least_cost(problem, budget, ordered=True),
            schedule_cost(problem, budget),
        )
        for budget in range(peak_bound(problem), simulate(problem, Plan()).peak_bytes)
    }
    assert all(ordered == found for _, ordered, found in costs.values())
    assert any(free is not None and free != ordered for free, ordered, _ in costs.values())


@settings(max_examples=40, deadline=None)
@given(SMALL)
def test_rounding_gives_a_plan_that_fits(problem):
    for budget in budgets(problem, 3):
        least = schedule_cost(problem, budget)
        try:
            plan = solve(problem, budget, "checkmate")
        except NoPlanFoundError:
            continue
        except InfeasibleError:
            assert least is None
            continue
        assert simulate(problem, plan).peak_bytes <= budget
        assert plan.recompute_cost >= least
        assert (plan.status == "optimal") == (plan.recompute_cost == least)


def test_chains_are_planned_to_the_end():
    problem = equal_chain(ops=7, input_bytes=8, hidden_bytes=24)
    plain = simulate(problem, Plan()).peak_bytes
    for budget in range(plain - 24, plain):
        plan = solve(problem, budget, "checkmate")
        assert plan.recompute_cost == solve(problem, budget, "exhaustive").recompute_cost


def test_what_fits_costs_nothing():
    problem = equal_chain(ops=4, input_bytes=8)
    found = best_schedule(problem, simulate(problem, Plan()).peak_bytes)
    assert (found.cost, found.bound, found.status, found.runs) == (0, 0, "optimal", ())


def test_runs_say_what_runs_when():
    problem = equal_chain(ops=5, input_bytes=8, hidden_bytes=8)
    found = best_schedule(problem, 64)
    assert len(found.runs) == found.cost == 3
    assert all(op <= turn for turn, op in found.runs)


def test_large_problems_are_refused():
    problem = gpt2(layers=4)
    with pytest.raises(PlanError, match=r"has \d+ cells, more than"):
        best_schedule(problem, simulate(problem, Plan()).peak_bytes - 1)


def test_no_time_gives_the_bound_of_the_relaxation():
    problem = equal_chain(ops=12, input_bytes=8, hidden_bytes=8)
    budget = 8 * 16
    whole = best_schedule(problem, budget)
    assert whole.status == "optimal"
    hurried = best_schedule(problem, budget, seconds=1e-3)
    assert hurried.status in ("optimal", "time limit")
    assert 0 < hurried.bound <= whole.cost
    assert hurried.cost is None or hurried.cost >= whole.cost


def test_one_layer_of_gpt2():
    """A gap to the bound is the bound's here: the relaxation and the schedule are above it."""
    problem = gpt2(layers=1)
    budget = problem.fixed_bytes + int(0.8 * simulate(problem, Plan()).activation_peak_bytes)
    relaxed = best_schedule(problem, budget, relaxed=True)
    assert relaxed.bound >= bound(problem, budget) > 0
    assert solve(problem, budget).recompute_cost >= relaxed.bound


def test_nothing_fits_below_every_schedule():
    problem = equal_chain(ops=5, input_bytes=8, hidden_bytes=8)
    for call in (best_schedule, lambda p, b: solve(p, b, "checkmate")):
        with pytest.raises(InfeasibleError, match=r"No (schedule|plan) fits|no schedule"):
            call(problem, peak_bound(problem) - 1)
