"""Python numbers that autograd saves as tensors of eight bytes, out of sight of all hooks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autockpt

WIDTH = 16


class Scaled(nn.Module):
    """Multiplies by numbers, divides by them, and by a complex one: 8, 8 and 16 bytes a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x) * 3.0 / 7).mul(2j).imag
        return x.square().mean()


@pytest.mark.parametrize("budget", ["100%", "75%"])
def test_numbers_are_predicted_to_the_byte(budget: str) -> None:
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(32, WIDTH)
    planned = autockpt.optimize(model, (x,), memory_budget=budget, cost="roofline")
    seen = autockpt.verify(model, planned, (x,))
    assert seen.ok
    assert seen.predicted_plain_peak_bytes == seen.plain_peak_bytes
    assert seen.predicted_peak_bytes == seen.peak_bytes
    assert planned.autockpt.problem.number_bytes == 6 * (8 + 8 + 16)
    assert autockpt.profile(model, (x,)).number_bytes == 6 * (8 + 8 + 16)
