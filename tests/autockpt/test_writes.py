"""Tensors that are written through a view: their gradients go through the write, exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autockpt
from autockpt.pipeline import lower_step
from autockpt.step import measure
from solvers.plan import Plan
from solvers.simulate import simulate


def added_to_a_slice(y: Tensor, x: Tensor) -> Tensor:
    y[..., :4].add_(x[..., :4])
    return y


def assigned(y: Tensor, x: Tensor) -> Tensor:
    y[:, 1:] = x[:, :-1]
    return y


def twice(y: Tensor, x: Tensor) -> Tensor:
    y[..., :4].mul_(2)
    y[..., 8:] += x[..., 8:]
    return y


def whole_and_slice(y: Tensor, x: Tensor) -> Tensor:
    y.mul_(0.5)
    y[..., :8].add_(x[..., :8])
    return y.neg_()


def through_a_view_of_a_view(y: Tensor, x: Tensor) -> Tensor:
    y.transpose(1, 2)[:, 8:16].add_(x.transpose(1, 2)[:, :8])
    return y


def into_zeros(y: Tensor, x: Tensor) -> Tensor:
    zeros = torch.zeros_like(y)
    zeros[..., :16].add_(y[..., :16])
    zeros[..., 16:].add_(x[..., 16:])
    return zeros.tanh()


def added_by_index(y: Tensor, x: Tensor) -> Tensor:
    rows = torch.arange(0, 48, 2)
    return torch.zeros_like(y).index_add_(1, rows, y[:, ::2]).index_add_(1, rows, x[:, ::2])


class Net(nn.Module):
    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x).sigmoid().tanh().clone()
            x = x + self.write(y, x)
        return x


ACTIVATION = 4 * 48 * 32 * 4


@pytest.mark.parametrize(
    ("write", "over"),
    [
        (added_to_a_slice, 0),
        (assigned, 0),
        # `y[...] += x` writes what it read back: the judge has a gradient of that too.
        (twice, ACTIVATION),
        (whole_and_slice, 0),
        (through_a_view_of_a_view, 0),
        # A slice gets a gradient buffer of its own for a moment, says the judge.
        (into_zeros, ACTIVATION // 2),
        (added_by_index, 0),
    ],
)
def test_the_peak_is_foreseen(write: Callable[[Tensor, Tensor], Tensor], over: int) -> None:
    torch.manual_seed(0)
    model, x = Net(write), torch.randn(4, 48, 32)
    problem = lower_step(model, (x,), {}, None, "roofline")[1]
    plain = measure(model, (x,)).peak_bytes
    # Numbers of Python that an op saves, 8 bytes each.
    assert -over <= plain - simulate(problem, Plan()).resident_peak_bytes <= 128
    for budget in ("90%", "80%"):
        planned = autockpt.optimize(
            copy.deepcopy(model), (x,), memory_budget=budget, cost="roofline"
        )
        assert planned.autockpt.plan.regions
        found = autockpt.verify(model, planned, (x,))
        assert not found.differences, found
        assert measure(planned, (x,)).peak_bytes <= planned.autockpt.report.budget_bytes
