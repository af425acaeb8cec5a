"""``verify`` finds every kind of difference, and leaves no trace."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autockpt
from autockpt.verify import Verification, same_bits, verify
from tests import zoo


class Net(nn.Module):
    """Dropout, batch norm, and a parameter that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.last = nn.Linear(32, 1)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = nn.functional.dropout(torch.relu(self.norm(self.first(x))), 0.5, self.training)
        return {"loss": self.last(hidden).mean(), "hidden": hidden}


def sharing(model: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """A model of another class with the same parameter and buffer objects."""
    other = copy.copy(model)
    other.__class__ = cls
    return other


@pytest.fixture
def batch() -> tuple[Tensor]:
    return (torch.randn(64, 16),)


def test_a_model_equals_itself_and_its_copy(batch: tuple[Tensor]) -> None:
    model = Net()
    for other in (model, copy.deepcopy(model), sharing(model, Net)):
        result = verify(model, other, batch)
        assert result
        assert result.ok
        assert result.differences == ()
        assert result.compared > 15
        assert result.peak_bytes == result.plain_peak_bytes > result.fixed_bytes > 0
        assert "equal to the bit" in str(result)


class Checkpointed(Net):
    """By hand: the usual mistake that moves running statistics twice."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_checkpoints_by_hand_move_batch_norm_twice(batch: tuple[Tensor]) -> None:
    model = Net()
    result = verify(model, sharing(model, Checkpointed), batch)
    assert not result.ok
    assert result.differences == (
        "buffer norm.running_mean",
        "buffer norm.running_var",
        "buffer norm.num_batches_tracked",
    )
    assert "3 of" in str(result)


class NewMask(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        torch.rand(1)
        return super().forward(x)


class NewGradient(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        output = super().forward(x)
        return output | {"loss": output["loss"] + 0.0 * self.unused.sum()}


class NegativeZero(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        output = super().forward(x)
        zeros = output["hidden"] == 0
        return output | {"hidden": output["hidden"].detach().masked_fill(zeros, -0.0)}


class WritesInput(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        output = super().forward(x.clone())
        x.add_(1)
        return output


class DrawsOutside(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        random.random()
        np.random.rand()
        return super().forward(x)


class LosesOutput(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(x)["loss"]}


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (NewMask, {"loss", "output['hidden']", "gradient of first.weight", "random state of cpu"}),
        (NewGradient, {"gradient of unused"}),
        (NegativeZero, {"output['hidden']"}),
        (WritesInput, {"input[0]"}),
        (DrawsOutside, {"random state of python", "random state of numpy"}),
        (LosesOutput, {"output['hidden']"}),
    ],
)
def test_names_what_differs(cls: type[nn.Module], names: set[str], batch: tuple[Tensor]) -> None:
    model = Net()
    assert names <= set(verify(model, sharing(model, cls), batch).differences)


class Clamped(Net):
    """Moves a weight in its forward, as a constraint does."""

    by = 0.9

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            self.last.weight.mul_(self.by)
        return super().forward(x)


class ClampedMore(Clamped):
    by = 0.8


def test_a_parameter_that_a_forward_writes(batch: tuple[Tensor]) -> None:
    model = Clamped()
    before = model.last.weight.detach().clone()
    assert verify(model, copy.deepcopy(model), batch)
    assert "parameter last.weight" in verify(model, sharing(model, ClampedMore), batch).differences
    assert torch.equal(model.last.weight, before)


@pytest.mark.parametrize("cls", [Net, WritesInput, DrawsOutside, Checkpointed])
def test_leaves_no_trace(cls: type[nn.Module], batch: tuple[Tensor]) -> None:
    model = Net()
    model.first.weight.grad = gradient = torch.ones_like(model.first.weight)
    x = batch[0].requires_grad_(cls is Net)
    before = copy.deepcopy(model.state_dict()), x.detach().clone()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    verify(model, sharing(model, cls), batch)
    assert all(map(torch.equal, model.state_dict().values(), before[0].values()))
    assert torch.equal(x, before[1])
    assert x.grad is None
    assert model.first.weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert model.last.weight.grad is None
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


class Fails(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        super().forward(x)["loss"].backward()
        raise RuntimeError("half way")


def test_leaves_no_trace_of_a_failure(batch: tuple[Tensor]) -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="half way"):
        verify(model, sharing(model, Fails), batch)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    assert model.first.weight.grad is None


def test_a_loss_outside_and_gradients_of_inputs() -> None:
    model = nn.Linear(4, 4)
    x = torch.randn(8, 4, requires_grad=True)
    assert verify(model, model, (x,), loss=torch.mean).ok
    assert verify(model, model, kwargs={"input": x}).ok


def test_a_budget_is_held_or_not(batch: tuple[Tensor]) -> None:
    def with_budget(nbytes: int) -> Verification:
        model = Net()
        other: Any = sharing(model, Net)
        other.autockpt = SimpleNamespace(
            report=SimpleNamespace(plain_peak_bytes=10, peak_bytes=9, budget_bytes=nbytes)
        )
        return verify(model, other, batch)

    peak = with_budget(2**30).peak_bytes
    assert with_budget(peak).ok
    over = with_budget(peak - 1)
    assert over.same_bits
    assert not over.ok
    assert over.predicted_peak_bytes == 9
    assert "1 B over the budget" in str(over)


@pytest.mark.parametrize("name", ["resnet", "t5"])
def test_real_models(name: str) -> None:
    case = zoo.ZOO[name]()
    assert verify(case.model, copy.deepcopy(case.model), *case[1:3], loss=case.loss).ok


def test_bits() -> None:
    values = torch.tensor([float("nan"), 1.0])
    assert same_bits(values, values.clone())
    assert same_bits(None, None)
    assert not same_bits(values, None)
    assert not same_bits(values, values.double())
    assert not same_bits(values, values[None])
    grid = torch.randn(3, 4)
    assert same_bits(grid, grid.t().contiguous().t())
    assert same_bits(torch.tensor(1j).conj(), torch.complex(torch.tensor(0.0), torch.tensor(-1.0)))
    assert same_bits(torch.eye(3).to_sparse(), torch.eye(3).to_sparse())
    assert not same_bits(torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse())
    assert same_bits(torch.tensor(True), torch.tensor(True))


def test_arguments_that_are_none_are_named() -> None:
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    for call in (
        lambda: autockpt.measure(model, x),
        lambda: autockpt.verify(model, model, x),
        lambda: autockpt.compare(model, x),
    ):
        with pytest.raises(TypeError, match=r"args is a Tensor.*write \(x,\)"):
            call()
    with pytest.raises(ValueError, match="gradients='foo' is neither"):
        autockpt.measure(model, (x,), gradients="foo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="repeats=0"):
        autockpt.measure(model, (x,), repeats=0)
    for repeats in (1.5, "2", True, None):
        with pytest.raises(TypeError, match=f"repeats={repeats!r} is not a whole number"):
            autockpt.measure(model, (x,), repeats=repeats)  # type: ignore[arg-type]


def test_an_optimized_model_is_not_taken_for_the_plain_one() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(4, 8)
    planned = autockpt.optimize(model, (x,), loss=torch.sum, memory_budget="100%")
    with pytest.raises(TypeError, match=r"a Sequential that optimize returned as the plain model"):
        verify(planned, model, (x,), loss=torch.sum)
    assert verify(model, planned, (x,), loss=torch.sum)
