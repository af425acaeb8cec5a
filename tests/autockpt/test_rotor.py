"""Nested plans of real chains: the best there are, and measured as predicted."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autockpt
from autockpt.pipeline import lower_step
from solvers import solve
from solvers.judge.replay import replay_of
from tests.solvers.test_chains import nested_plans

ROWS = 256


class Chain(nn.Module):
    """Linears without bias (their gradient is let go of a little late) and activations."""

    def __init__(self, widths: list[int], activations: list[bool]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for low, high, active in zip(widths, widths[1:], activations, strict=False):
            layers.append(nn.Linear(low, high, bias=False))
            layers += [nn.Tanh()] * active
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


WIDTHS = st.lists(st.integers(1, 8).map(lambda n: 16 * n), min_size=3, max_size=3)


@settings(max_examples=6, deadline=None)
@given(WIDTHS, st.lists(st.booleans(), min_size=2, max_size=2))
def test_rotor_is_the_best_nested_plan_and_its_peak_is_measured(
    widths: list[int], activations: list[bool]
) -> None:
    torch.manual_seed(0)
    model = Chain(widths, activations)
    batch = (torch.randn(ROWS, widths[0]),)
    _, problem = lower_step(model, batch, {}, None, "roofline")
    replay = replay_of(problem)
    prices = [replay.price(plan) for plan in nested_plans(0, len(problem.ops), (-1, -1))]
    budgets = sorted({peak for peak, _ in prices})
    expected = gradients(model, batch)
    for budget in (budgets[0], budgets[len(budgets) // 2], budgets[-1]):
        plan = solve(problem, budget, "rotor")
        assert plan.recompute_cost == min(cost for peak, cost in prices if peak <= budget)
        ours: Any = autockpt.optimize(model, batch, memory_budget=2**40, plan=plan, cost="roofline")
        peak = autockpt.measure(ours, batch).peak_bytes
        assert peak == plan.peak_bytes <= budget
        assert all(map(torch.equal, expected, gradients(ours, batch)))


def gradients(model: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor]:
    return list(torch.autograd.grad(model(*batch), list(model.parameters())))
