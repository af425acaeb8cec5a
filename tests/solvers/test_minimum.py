"""The least peak: no higher than what any solver reaches, and a budget that `auto` plans."""

from __future__ import annotations

import pytest

from solvers import SOLVERS, InfeasibleError, Plan, least_peak, peak_bound, simulate, solve
from tests.solvers.models import gelu_blocks, u_shape

MAKERS = {
    "u of 3": lambda: u_shape(depth=3),
    "u of 4": lambda: u_shape(depth=4),
    "u of 8": lambda: u_shape(depth=8),
    "gelu": lambda: gelu_blocks(blocks=4),
}
QUICK = sorted(set(SOLVERS) - {"auto", "checkmate", "exhaustive", "ilp"})


@pytest.fixture(scope="module", params=MAKERS)
def problem(request):
    return MAKERS[request.param]()


def least_of(problem, solver):
    """Return the least peak for which a solver has a plan, to a thousandth."""
    low, high = peak_bound(problem), simulate(problem, Plan()).peak_bytes
    step = (high - problem.fixed_bytes) // 1000
    while high - low > step:
        middle = (low + high) // 2
        try:
            high = solve(problem, middle, solver).peak_bytes
        except InfeasibleError:
            low = middle
    return high


def test_no_solver_goes_far_below_it(problem):
    fixed = problem.fixed_bytes
    least = least_peak(problem).peak_bytes - fixed
    for solver in QUICK:
        assert least <= 1.01 * (least_of(problem, solver) - fixed), solver


def test_auto_plans_at_it_and_for_no_more_than_the_others(problem):
    least, plain = least_peak(problem).peak_bytes, simulate(problem, Plan()).peak_bytes
    for percent in (0, 5, 15, 30, 60):
        budget = least + (plain - least) * percent // 100
        cost = solve(problem, budget).recompute_cost
        for solver in QUICK:
            try:
                found = solve(problem, budget, solver)
            except InfeasibleError:
                continue
            assert cost <= found.recompute_cost, (percent, solver)


@pytest.mark.parametrize("depth", [4, 5])
def test_auto_is_no_dearer_than_the_best_flat_regions(depth):
    problem = u_shape(depth)
    low = least_of(problem, "interval_dp")
    plain = simulate(problem, Plan()).peak_bytes
    for percent in (15, 30, 60):
        budget = low + (plain - low) * percent // 100
        best = solve(problem, budget, "ilp")
        assert best.status == "optimal"
        assert solve(problem, budget).recompute_cost <= best.recompute_cost, percent


def test_the_one_of_flat_regions_is_named_by_the_solvers_of_these():
    problem = u_shape(depth=4)
    flat = least_of(problem, "min_cut")
    for solver in ("interval_dp", "ilp"):
        with pytest.raises(InfeasibleError) as caught:
            solve(problem, peak_bound(problem) - 1, solver)
        assert caught.value.minimum_bytes <= 1.01 * flat
