"""Solvers side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import autockpt
from autockpt import compare
from solvers import SOLVERS
from tests.zoo import gpt2

BUDGETS = tuple(f"{percent}%" for percent in range(25, 100, 6))


@pytest.fixture(scope="module")
def found():
    case = gpt2(layers=2)
    return compare(case.model, case.args, case.kwargs, budgets=BUDGETS)


def test_a_larger_budget_never_costs_more(found) -> None:
    for solver in {entry.solver for entry in found.entries if entry.budget_text}:
        costs = [entry.recompute_cost for entry in found.of(solver)]
        assert len(costs) == len(BUDGETS)
        planned = [cost for cost in costs if cost is not None]
        assert planned == sorted(planned)
        assert None not in costs[: len(planned)]


def test_auto_is_the_cheapest_and_no_plan_is_below_the_bound(found) -> None:
    for limit, best in zip(found.bounds, found.of("auto"), strict=True):
        for entry in found.entries:
            if entry.budget_bytes != limit.budget_bytes or entry.recompute_cost is None:
                continue
            assert entry.activation_peak_bytes <= limit.budget_bytes - found.fixed_bytes
            assert limit.cost <= best.recompute_cost <= entry.recompute_cost


class Residual(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        inner = nn.Linear(width, 4 * width), nn.ReLU(inplace=True), nn.Linear(4 * width, width)
        self.inner = nn.Sequential(nn.LayerNorm(width), *inner, nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def test_auto_is_no_dearer_than_an_integer_program() -> None:
    model = nn.Sequential(*[Residual() for _ in range(4)])
    budgets = ("96%", "93%", "81%", "63%")
    found = compare(model, (torch.ones(512, 64),), budgets=budgets, solvers=("ilp", "auto"))
    for exact, best in zip(found.of("ilp"), found.of("auto"), strict=True):
        assert exact.status == "optimal"
        assert best.recompute_cost <= exact.recompute_cost


def test_a_solver_that_takes_no_model_of_that_size_leaves_the_others_in_the_table() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    found = compare(model, (torch.ones(256, 64),), budgets=("90%",), solvers=("auto", "exhaustive"))
    (auto,), (exhaustive,) = found.of("auto"), found.of("exhaustive")
    assert auto.status != "none found"
    assert auto.reason == ""
    assert exhaustive.status == "none found"
    assert exhaustive.recompute_cost is None
    assert "at most 10 ops; this problem has 13" in exhaustive.reason
    assert json.loads(found.to_json())["entries"][-1]["reason"] == exhaustive.reason
    assert "exhaustive" in str(found)


def test_it_is_said_as_table_and_json(found) -> None:
    text = str(found)
    assert "auto" in text
    assert "bound" in text
    assert "a block a region" in text
    data = json.loads(found.to_json())
    assert len(data["entries"]) == len(found.entries)
    assert data["entries"][0]["recompute_share"] == 0.0


def test_it_is_drawn(found, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = found.plot(tmp_path / "front.png")
    assert (tmp_path / "front.png").stat().st_size > 10_000
    labels = {text.get_text() for text in figure.axes[0].get_legend().get_texts()}
    assert {"auto", "rotor", "bound, any schedule"} <= labels


def test_a_solver_that_does_not_exist_is_refused() -> None:
    case = gpt2(layers=1)
    with pytest.raises(ValueError, match="no solver 'magic'"):
        compare(case.model, case.args, case.kwargs, solvers=("magic",))
    assert "magic" not in SOLVERS


def test_one_budget_or_solver_is_not_read_letter_by_letter() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match=r"budgets='50%' is one budget"):
        autockpt.compare(model, (torch.ones(2, 4),), budgets="50%")
    with pytest.raises(TypeError, match=r"solvers='auto' is one solver"):
        autockpt.compare(model, (torch.ones(2, 4),), solvers="auto")
