"""The judge against a toy runtime that really runs the step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.judge.replay import Replay
from solvers.simulate import simulate
from tests.solvers.checker import check
from tests.solvers.problems import plans, problems


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_judge_agrees_with_the_runtime(data):
    problem = data.draw(problems())
    plan = data.draw(plans(problem))
    found = simulate(problem, plan, timeline=True)
    expected = check(problem, plan)
    assert (
        found.resident_peak_bytes,
        found.fresh_peak_bytes,
        found.recompute_cost,
        found.recomputed_ops,
    ) == expected
    assert found.peak_bytes == max(expected[:2])
    assert max(level for _, _, level in found.timeline) == found.resident_peak_bytes
    assert Replay(problem).price(plan.regions) == (found.peak_bytes, found.recompute_cost)
