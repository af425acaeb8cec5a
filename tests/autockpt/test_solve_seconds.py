"""A time limit on solving: a plan all the same, inside the budget, and the report says so."""

from __future__ import annotations

import autockpt
from tests.zoo import gpt2


def test_the_best_plan_by_then_is_used_and_said_so() -> None:
    case = gpt2()
    call = (case.model, case.args, case.kwargs)
    options = {"memory_budget": "50%", "cost": "roofline"}
    hurried = autockpt.optimize(*call, **options, solve_seconds=1e-6)
    assert hurried.autockpt.plan.status == "time limit"
    assert "time limit" in str(hurried.autockpt.report)
    seen = autockpt.verify(*call[:1], hurried, *call[1:])
    assert seen.same_bits
    assert seen.within_budget
    patient = autockpt.optimize(*call, **options, solve_seconds=600)
    assert patient.autockpt.plan.status != "time limit"
    assert patient.autockpt.plan.recompute_cost <= hurried.autockpt.plan.recompute_cost
