"""The least peak that is named is found when it is asked for, after costs were measured anew."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import (
    SOLVERS,
    InfeasibleError,
    Plan,
    checkmate,
    least_peak,
    modules,
    peak_bound,
    simulate,
    solve,
)
from solvers.steady import steady
from tests.solvers.models import gpt2
from tests.solvers.problems import plans, problems
from tests.solvers.test_chains import chains
from tests.solvers.test_modules import with_spans
from tests.solvers.tight import tight_problems

PROBLEMS = st.one_of(problems(max_ops=9), tight_problems(most_ops=9), chains())
SMALL_SOLVERS = {"checkmate", "exhaustive", "ilp"}


def with_other_costs(problem, rng):
    """The same problem after its costs were measured anew, under a load of all kinds."""

    def measured(index, op):
        cost = rng.choice([1, 5, 40, 1000, 10**6])
        own = any(problem.storages[s].producer == index for s in op.saved)
        # Whether an op that saves nothing of its own making runs in part is no measurement.
        stop_cost = rng.randint(0 if own else 1, cost) if own or op.stop_cost else 0
        return replace(op, cost=cost, stop_cost=stop_cost, backward_cost=rng.randint(0, cost))

    ops = tuple(measured(index, op) for index, op in enumerate(problem.ops))
    return replace(problem, ops=ops, region_cost=rng.choice([0, 30, 10**5]))


def named_minimum(problem, solver):
    """The least peak that a solver names, or what the plain step needs where that is least."""
    with pytest.raises(InfeasibleError) as caught:
        solve(problem, peak_bound(problem) - 1, solver)
    return caught.value.minimum_bytes


@settings(max_examples=30, deadline=None)
@given(PROBLEMS, st.randoms(use_true_random=False))
def test_the_least_peak_does_not_depend_on_costs(problem, rng):
    least = least_peak(problem)
    for other in (problem, *(with_other_costs(problem, rng) for _ in range(3))):
        assert least_peak(other).regions == least.regions
        assert least_peak(other).peak_bytes == least.peak_bytes
        assert solve(other, least.peak_bytes).peak_bytes <= least.peak_bytes


def test_nor_does_it_in_a_transformer():
    rng = random.Random(7)
    for problem in (gpt2(layers=3), with_spans(gpt2(layers=3))):
        least = least_peak(problem)
        for _ in range(2):
            other = with_other_costs(problem, rng)
            assert least_peak(other).peak_bytes == least.peak_bytes
            assert solve(other, least.peak_bytes).peak_bytes <= least.peak_bytes


@pytest.mark.parametrize("solver", sorted(SOLVERS))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_a_solver_names_as_least_it_then_finds(solver, data):
    sizes = 6 if solver in SMALL_SOLVERS else 9
    problem = data.draw(
        st.one_of(problems(max_ops=sizes), tight_problems(most_ops=sizes), chains())
    )
    rng = data.draw(st.randoms(use_true_random=False))
    least = named_minimum(problem, solver)
    plain = simulate(problem, Plan()).peak_bytes
    beyond = [least + (plain - least) * k // 3 for k in range(4) if least < plain]
    other = with_other_costs(problem, rng)
    assert named_minimum(other, solver) == least
    for budget in (least, least + 1, *beyond):
        for asked in (problem, other):
            plan = solve(asked, budget, solver)
            assert simulate(asked, plan).peak_bytes == plan.peak_bytes <= budget
            assert simulate(asked, plan).recompute_cost == plan.recompute_cost


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_peak_is_the_same_under_steady_costs(data):
    problem = data.draw(problems())
    plan = data.draw(plans(problem))
    rng = data.draw(st.randoms(use_true_random=False))
    other = with_other_costs(problem, rng)
    peaks = {simulate(p, plan).peak_bytes for p in (problem, other, steady(problem))}
    assert len(peaks) == 1
    assert steady(other) == steady(problem)


def test_module_calls_of_least_peak_are_taken_where_the_search_misses_them(monkeypatch):
    problem = with_spans(gpt2(layers=2))
    least = least_peak(problem).peak_bytes
    monkeypatch.setattr(modules._Search, "run", lambda search: None)
    assert solve(problem, least).peak_bytes == least


def test_checkmate_takes_the_least_peak_where_rounding_fails(monkeypatch):
    problem = gpt2(layers=1)
    least = least_peak(problem).peak_bytes
    monkeypatch.setattr(checkmate, "_candidates", lambda replay, schedule: [])
    plan = solve(problem, least, "checkmate", seconds=0.1)
    assert (plan.solver, plan.peak_bytes) == ("checkmate", least)
