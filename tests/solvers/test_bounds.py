"""The bounds against every schedule of small problems, and against every plan of the zoo."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import SOLVERS, InfeasibleError, Plan, bound, least_peak, peak_bound, simulate, solve
from solvers.chains import equal_chain
from tests.solvers import schedules
from tests.solvers.checker import check
from tests.solvers.models import gpt2
from tests.solvers.problems import plans
from tests.solvers.tight import SMALL, budgets


def bound_or_none(problem, budget):
    try:
        return bound(problem, budget)
    except InfeasibleError:
        return None


@settings(max_examples=60, deadline=None)
@given(SMALL)
def test_no_schedule_goes_below_the_bound(problem):
    oracle = schedules.Schedules(problem)
    for budget in budgets(problem, 6):
        least = oracle.least_cost(budget)
        if least is not None:
            assert bound(problem, budget) <= least


@settings(max_examples=40, deadline=None)
@given(SMALL)
def test_no_schedule_goes_below_the_peak_bound(problem):
    plain = simulate(problem, Plan()).peak_bytes
    low = peak_bound(problem)
    assert low <= schedules.least_peak(problem, low // 2, plain)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_plan_is_a_schedule(data):
    """The oracle covers the plans: none costs less than the least schedule at its peak."""
    problem = data.draw(SMALL)
    plan = data.draw(plans(problem))
    resident, fresh, cost, _ = check(problem, plan)
    least = schedules.least_cost(problem, max(resident, fresh))
    assert least is not None
    assert least <= cost


def test_a_bound_too_high_by_a_hundredth_is_found_out():
    """Where bytes come in equal lots there are budgets that leave no gap."""
    problem = equal_chain(ops=4, input_bytes=8, hidden_bytes=8)
    ops = tuple(replace(op, cost=1000, stop_cost=1000) for op in problem.ops)
    problem = replace(problem, ops=ops)
    found = [
        1.01 * bound(problem, budget) > schedules.least_cost(problem, budget)
        for budget in range(
            schedules.least_peak(problem, 0, 96), simulate(problem, Plan()).peak_bytes
        )
    ]
    assert any(found)


@pytest.mark.parametrize("name", sorted(set(SOLVERS) - {"exhaustive", "checkmate"}))
def test_no_solver_goes_below_the_bound(name):
    problem = gpt2(layers=2)
    plain = simulate(problem, Plan()).activation_peak_bytes
    for share in (0.3, 0.5, 0.8):
        budget = problem.fixed_bytes + int(share * plain)
        try:
            plan = solve(problem, budget, name, seconds=2.0 if name == "ilp" else None)
        except InfeasibleError:
            continue
        assert plan.recompute_cost >= bound(problem, budget)


def test_a_larger_budget_never_has_a_larger_bound():
    problem = gpt2(layers=2)
    plain = simulate(problem, Plan()).peak_bytes
    low = least_peak(problem).peak_bytes
    found = [bound(problem, low + (plain - low) * k // 12) for k in range(13)]
    assert found == sorted(found, reverse=True)
    assert (found[0] > 0, found[-1]) == (True, 0)
