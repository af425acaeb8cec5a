"""On the zoo no solver goes below the bound, and of no solver does more memory cost more."""

from __future__ import annotations

import pytest

from autockpt.compare import compare_problem
from autockpt.pipeline import lower_step
from solvers import bound, peak_bound
from tests.zoo import ZOO

BUDGETS = ("50%", "30%")
SOLVERS = (
    "every_k",
    "sqrt_n",
    "chen_greedy",
    "treeverse",
    "min_cut",
    "rotor",
    "interval_dp",
    "auto",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ZOO))
def test_no_solver_goes_below_the_bound(name: str) -> None:
    case = ZOO[name]()
    _, problem = lower_step(case.model, case.args, case.kwargs, case.loss, "roofline")
    found = compare_problem(problem, budgets=BUDGETS, solvers=SOLVERS)
    least = {limit.budget_bytes: limit.cost for limit in found.bounds}
    planned = [entry for entry in found.entries if entry.recompute_cost is not None]
    for entry in planned:
        if entry.budget_bytes is None:
            assert entry.activation_peak_bytes is not None
            peak = found.fixed_bytes + entry.activation_peak_bytes
            assert (entry.recompute_cost or 0) >= bound(problem, max(peak, peak_bound(problem)))
            continue
        limit = least[entry.budget_bytes]
        assert limit is not None
        assert (entry.recompute_cost or 0) >= limit
    assert len([entry for entry in planned if entry.solver == "auto"]) >= 1
    for solver in SOLVERS:
        # The largest budget comes first.
        costs = [e.recompute_cost for e in found.of(solver) if e.recompute_cost is not None]
        assert costs == sorted(costs)
    bounds = [limit.cost for limit in found.bounds if limit.cost is not None]
    assert bounds == sorted(bounds)
