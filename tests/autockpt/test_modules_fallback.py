"""Graph or modules: what one of them cannot do inside the budget is left to the other."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autockpt
from autockpt import FallbackWarning, InfeasibleError, NoPlanFoundError
from tests.helpers import activation_peak_bytes, assert_same_bits, run_step


def _x(seed: int = 1) -> Tensor:
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(seed))


class Routed(nn.Module):
    """Tokens go to experts, and guards ask whether there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        found = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            tokens = torch.where(chosen == index)[0]
            if len(tokens):
                found.index_add_(0, tokens, expert(x[tokens]))
        return x + found


class Scaled(nn.Module):
    """What could be forgotten lies between its modules; a number differs in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1 + float(x.mean()))
        for layer in self.layers:
            x = layer(x.sin().exp().tanh())
        return x


def _routed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Routed(), Routed(), Routed())


def _optimize(model: nn.Module, budget: int | str, **options: Any) -> Any:
    return autockpt.optimize(
        copy.deepcopy(model), (_x(),), memory_budget=budget, cost="roofline", **options
    )


def test_modules_are_tried_before_a_budget_is_refused() -> None:
    plain = _routed()
    with pytest.raises(NoPlanFoundError):
        _optimize(plain, "60%", emit="graph")
    with pytest.warns(FallbackWarning, match="torch calls do not reach the budget: they need"):
        ours = _optimize(plain, "60%")
    assert ours.autockpt.over_modules
    report = ours.autockpt.report
    assert report.fixed_bytes + activation_peak_bytes(ours, (_x(),)) <= report.budget_bytes
    assert_same_bits(run_step(copy.deepcopy(plain), (_x(),)), run_step(ours, (_x(),)))


def test_the_smaller_budget_of_the_two_is_named() -> None:
    for plain, lower in ((_routed(), "modules"), (Scaled(), "graph")):
        least = autockpt.minimum_budget(plain, (_x(),))
        each = [autockpt.minimum_budget(plain, (_x(),), emit=emit) for emit in ("graph", "modules")]
        assert least == min(each) == each[("graph", "modules").index(lower)] < max(each)
        assert _optimize(plain, least).autockpt.over_modules is (lower == "modules")
        with pytest.raises(InfeasibleError) as refused:
            _optimize(plain, least - 20_000)
        assert refused.value.minimum_bytes == least


def test_a_graph_is_kept_where_modules_need_more() -> None:
    plain = Scaled()
    ours = _optimize(plain, "60%")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(8):
            expected = run_step(plain, (_x(seed),))
            assert_same_bits(expected, run_step(ours, (_x(seed),)))
    (warning,) = caught
    assert warning.category is FallbackWarning
    assert "do not reach the budget" in str(warning.message)
    assert not ours.autockpt.over_modules
    # No step tries all that came before it.
    assert len(ours.autockpt._entries) <= 2
    report = ours.autockpt.report
    assert report.recompute_cost > 0
    assert report.fixed_bytes + activation_peak_bytes(ours, (_x(7),)) <= report.budget_bytes
