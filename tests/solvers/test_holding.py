"""What is alive at the peak adds up to the peak."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.judge.holding import Holding, alive_at_peak
from solvers.plan import Plan
from solvers.problem import Problem
from solvers.simulate import simulate
from tests.solvers.models import gpt2
from tests.solvers.problems import plans, problems


def parts(holding: Holding) -> int:
    held = sum(entry.nbytes for entry in holding.held)
    there = holding.fixed_bytes + holding.number_bytes
    return there + holding.gradient_bytes + holding.workspace_bytes + held


def agree(problem: Problem, plan: Plan) -> None:
    holding, prediction = alive_at_peak(problem, plan), simulate(problem, plan)
    assert holding.level_bytes == prediction.peak_bytes
    assert parts(holding) == prediction.peak_bytes, holding


def with_workspaces(problem: Problem, amounts: list[tuple[int, int, int]]) -> Problem:
    """Peaks move to forward and to replays where ops need room there."""
    ops = tuple(
        replace(
            op,
            forward_workspace_bytes=forward,
            dropped_workspace_bytes=forward // 2,
            backward_workspace_bytes=backward,
            stop_peak_bytes=stop,
        )
        for op, (forward, backward, stop) in zip(problem.ops, amounts, strict=True)
    )
    return replace(problem, ops=ops)


SOME = st.sampled_from([0, 0, 0, 5, 60, 300])


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_parts_of_a_random_step_add_up_to_its_peak(data):
    problem = data.draw(problems())
    plan = data.draw(plans(problem))
    agree(problem, plan)
    size = len(problem.ops)
    amounts = data.draw(st.lists(st.tuples(SOME, SOME, SOME), min_size=size, max_size=size))
    agree(with_workspaces(problem, amounts), plan)


def test_plain_gpt2_holds_what_its_ops_saved():
    problem = gpt2(layers=2)
    holding = alive_at_peak(problem, Plan())
    agree(problem, Plan())
    assert {entry.why for entry in holding.held} <= {"saved", "output", "in use"}
    assert all(entry.by for entry in holding.held if entry.why == "saved")
