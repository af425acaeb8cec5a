"""Steps of one shape that call other modules than the step before: each keeps the budget."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autockpt
from tests.autockpt.test_modules import Block, Stack
from tests.helpers import peak_above_start


def _x() -> Tensor:
    return torch.randn(8, 128, 32, generator=torch.Generator().manual_seed(1))


def _planned(model: nn.Module, budget: int | str = "60%") -> Any:
    return autockpt.optimize(
        model, (_x(),), memory_budget=budget, loss=_loss, emit="modules", cost="roofline"
    )


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


def _over(model: Any) -> bool:
    """Run a step twice, and say whether the first time was over its budget.

    Only the second may plan anew: the profiler that measures the first is in the way.
    """
    state, steps = random.getstate(), getattr(model, "steps", 0)
    x = _x()
    peak = peak_above_start(partial(_step, model, x))
    report = model.autockpt.report
    random.setstate(state)
    model.steps = steps
    _step(model, x)
    return bool(report.fixed_bytes + peak > report.budget_bytes)


def _step(model: nn.Module, x: Tensor) -> None:
    output = model(x)
    _loss(output).backward()


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
        assert not _over(model)


class Towers(nn.Module):
    """One of two towers, as the way says, behind layers that both share."""

    def __init__(self, how: str, depths: tuple[int, int] = (4, 4)) -> None:
        super().__init__()
        self.stem = Stack(depth=2, dropout=0.0)
        self.left = Stack(depth=depths[0], dropout=0.0)
        self.right = Stack(depth=depths[1], dropout=0.0)
        self.how, self.steps = how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        goes_right = random.random() < 0.5 if self.how == "draw" else self.steps % 2
        tower: nn.Module = self.right if goes_right else self.left
        found: Tensor = tower(self.stem(x))
        return found


class Shuffled(Stack):
    """Each step calls the layers in another order."""

    def forward(self, x: Tensor) -> Tensor:
        for index in random.sample(range(len(self.blocks)), len(self.blocks)):
            x = self.blocks[index](x)
        return x


class Cropped(Stack):
    """Each step takes as much of the batch as it draws."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, : random.choice((32, 64, 128))])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "build",
    [lambda: Towers("draw"), lambda: Towers("count"), lambda: Cropped(6, 0.0)],
    ids=["drawn towers", "counted towers", "crops"],
)
def test_a_kind_of_step_is_over_the_budget_once(build: Callable[[], nn.Module], seed: int) -> None:
    torch.manual_seed(0)
    random.seed(seed)
    plain = build()
    model = _planned(copy.deepcopy(plain))
    again = random.getstate()
    over = [_over(model) for _ in range(12)]
    # There are at most two kinds that planning did not see.
    assert sum(over) <= 2
    assert model.autockpt.report.recompute_cost > 0
    random.setstate(again)
    for _ in range(12):
        state, steps = random.getstate(), getattr(plain, "steps", 0)
        _step(plain, _x())
        random.setstate(state)
        plain.steps = steps  # type: ignore[assignment]
        _step(plain, _x())
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_one_plan_serves_every_kind() -> None:
    random.seed(0)
    model = _planned(Towers("count"))
    assert [_over(model) for _ in range(6)].count(True) <= 1
    (entry,) = model.autockpt._entries
    assert len(entry.steps) == 2
    codes = set()
    for _ in range(2):
        peak = peak_above_start(partial(_step, model, _x()))
        # The report is of the tower that ran.
        report = model.autockpt.report
        assert abs(report.fixed_bytes + peak - report.peak_bytes) <= 0.01 * peak
        codes.add(model.autockpt.code)
    assert len(codes) == 2


def test_shuffled_layers_settle() -> None:
    random.seed(0)
    model = _planned(Shuffled(6, 0.0))
    for _ in range(24):
        _over(model)
    assert not any(_over(model) for _ in range(8))


def test_kinds_are_limited_and_a_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autockpt.modules.entry.MAX_KINDS", 1)
    random.seed(0)
    model = _planned(Towers("count"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            _step(model, _x())
    assert ["more than 1 different ways" in str(w.message) for w in caught] == [True]


def test_a_kind_that_nothing_fits_trains_on_and_says_so() -> None:
    random.seed(0)
    model = Towers("count", depths=(12, 1))
    small = autockpt.minimum_budget(model, (_x(),), loss=_loss, emit="modules")
    model = _planned(model, small)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            _step(model, _x())
    assert ["no regions were found" in str(w.message) for w in caught] == [True]
    assert model.autockpt.report.recompute_cost > 0


class Fickle(Block):
    """When told to, it gives other results each time, by a count that no one sees."""

    counted = itertools.count(1)
    told = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / next(self.counted) if self.told else x)


class SharedFickle(Towers):
    """In steps to the right the shared layers must not run again."""

    def __init__(self) -> None:
        super().__init__("count")
        self.stem.blocks = nn.ModuleList(Fickle() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.stem.blocks:
            block.told = self.steps % 2 == 0  # type: ignore[assignment]
        return super().forward(x)


def test_what_must_not_run_again_in_one_kind_does_so_in_none() -> None:
    plain = SharedFickle()
    plain.steps = 1
    model = _planned(plain, "70%")
    assert any(path.startswith("stem") for path in model.autockpt._entries[0].step.regions.calls)
    for _ in range(4):
        _step(model, _x())
    (entry,) = model.autockpt._entries
    assert len(entry.steps) == 2
    assert entry.step.regions.calls
    assert not any(path.startswith("stem") for path in entry.step.regions.calls)
