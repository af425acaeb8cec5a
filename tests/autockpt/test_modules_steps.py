"""Steps of one shape that call other modules than the step before: each keeps the budget."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autockpt
from tests.autockpt.test_modules import Stack
from tests.helpers import peak_above_start


def _x() -> Tensor:
    return torch.randn(8, 128, 32, generator=torch.Generator().manual_seed(1))


def _planned(model: nn.Module, budget: str = "60%") -> Any:
    return autockpt.optimize(model, (_x(),), memory_budget=budget, emit="modules", cost="roofline")


def _over(model: Any) -> bool:
    """Run a step and say whether it was over its budget."""
    x = _x()
    peak = peak_above_start(lambda: model(x).square().mean().backward())
    report = model.autockpt.report
    return bool(report.fixed_bytes + peak > report.budget_bytes)


class Taught(Stack):
    """In some steps a pass without grad comes before the one with grad."""

    def __init__(self, how: str) -> None:
        super().__init__(depth=6, dropout=0.0)
        self.how, self.steps = how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if random.random() < 0.5 if self.how == "draw" else self.steps % 3:
            with torch.no_grad():
                x = x + super().forward(x)
        return super().forward(x)


@pytest.mark.parametrize("how", ["draw", "count"])
@pytest.mark.parametrize("seed", [4, 7, 10])
def test_calls_without_grad_make_no_difference(how: str, seed: int) -> None:
    torch.manual_seed(0)
    random.seed(seed)
    model = _planned(Taught(how))
    assert model.autockpt.report.recompute_cost > 0
    for _ in range(6):
        model.zero_grad(set_to_none=False)
        assert not _over(model)
