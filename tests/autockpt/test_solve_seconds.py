"""A time limit on solving: a plan all the same, inside the budget, and the report says so."""

from __future__ import annotations

import time

import torch
from torch import nn

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


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = x + self.inner(x)
        return added


def test_checkmate_is_handed_the_limit() -> None:
    """Its program of these ops is not solved in five times as long."""
    model, batch = nn.Sequential(*[Residual() for _ in range(8)]), torch.randn(512, 16)
    started = time.process_time()
    hurried = autockpt.optimize(
        model, (batch,), memory_budget="60%", solver="checkmate", solve_seconds=1.0
    )
    assert time.process_time() - started < 20
    assert hurried.autockpt.plan.solver == "checkmate"
    assert hurried.autockpt.plan.status == "time limit"
    assert hurried.autockpt.plan.regions
