"""What holds the memory: rows that add up to the peak, for plain and planned, and on meta."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
import torch
from torch import nn

import autockpt
from autockpt.holding import MemoryProfile
from tests.zoo import ZOO, Case


def parts(found: MemoryProfile) -> int:
    rows = sum(row.nbytes for row in found.rows)
    there = found.fixed_bytes + found.number_bytes
    return there + rows + found.gradient_bytes + found.workspace_bytes


def profiled(case: Case) -> MemoryProfile:
    return autockpt.profile(case.model, case.args, case.kwargs, loss=case.loss)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_rows_add_up_to_the_peak_that_is_measured(name: str) -> None:
    case = ZOO[name]()
    found = profiled(case)
    measured = autockpt.measure(
        case.model, case.args, case.kwargs, loss=case.loss, gradients=found.gradients
    )
    assert parts(found) == found.peak_bytes
    assert found.fixed_bytes == measured.fixed_bytes
    error = found.peak_bytes - measured.peak_bytes
    assert abs(error) <= 0.005 * measured.activation_peak_bytes
    sizes = [row.nbytes for row in found.rows]
    assert sizes == sorted(sizes, reverse=True)
    largest = [row for row in found.rows if row.share > 0.01]
    assert all(row.made_by and row.made_source for row in largest)


def test_an_optimized_model_is_looked_at_under_its_plan() -> None:
    case = ZOO["gpt2"]()
    model = autockpt.optimize(case.model, case.args, case.kwargs, memory_budget="50%")
    found = autockpt.profile(model)
    assert parts(found) == found.peak_bytes == model.autockpt.report.peak_bytes
    assert found.regions == len(tuple(model.autockpt.plan.walk())) > 0
    assert "region input" in {row.why for row in found.rows}
    again = autockpt.profile(model, case.args, case.kwargs)
    assert again.peak_bytes == found.peak_bytes
    assert any(row.shape for row in again.rows)


def test_a_model_on_meta_is_taken_apart_without_any_memory() -> None:
    case = ZOO["vit"]()
    expected = profiled(case)
    kwargs = {name: value.to("meta") for name, value in case.kwargs.items()}
    found = autockpt.profile(case.model.to("meta"), (), kwargs)
    assert parts(found) == found.peak_bytes
    assert abs(found.peak_bytes - expected.peak_bytes) < 0.01 * expected.peak_bytes
    assert found.rows[:20] == expected.rows[:20]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def test_rows_name_who_keeps_what_and_are_exported() -> None:
    found = autockpt.profile(nn.Sequential(Mlp(), Mlp(), Mlp()), (torch.ones(512, 32),))
    first = found.rows[0]
    assert (first.nbytes, first.shape, first.dtype) == (512 * 128 * 4, (512, 128), "float32")
    assert first.saved_by == ("torch.tanh", "torch.nn.functional.linear")
    assert first.made_by == "torch.tanh"
    assert first.module == "0"
    assert first.source.startswith("test_holding.py:")

    assert found.to_dicts()[0]["nbytes"] == first.nbytes
    assert json.loads(found.to_json())["rows"][0]["module"] == "0"
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert len(rows) == len(found.rows)
    assert rows[0]["saved_by"] == "torch.tanh torch.nn.functional.linear"

    text = str(found)
    assert "saved by tanh, linear" in text
    assert "{0-1}" in text
    assert max(map(len, text.splitlines())) <= 110


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match="not a torch.nn.Module"):
        autockpt.profile(torch.ones, (torch.ones(1),))  # type: ignore[arg-type]


def test_a_model_over_modules_is_looked_at_over_modules() -> None:
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
    model, x = nn.Sequential(*layers), torch.randn(128, 32)
    ours: Any = autockpt.optimize(model, (x,), memory_budget="80%", emit="modules", cost="roofline")
    assert ours.autockpt.plan.regions
    found = autockpt.profile(ours, (x,))
    assert found.peak_bytes == ours.autockpt.report.peak_bytes
