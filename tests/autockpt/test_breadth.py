"""Kinds of forwards that torch's databases, awkward architectures and fuzz have brought up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autockpt
from autockpt import CaptureError
from autockpt.profiler.tensors import overlap
from benchmarks.trial import SOLVERS, Subject, Trial, attempt

WIDTH = 32


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.middle(self.first(x).tanh())).square().mean()

    def middle(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def _x(rows: int = 64) -> Tensor:
    return torch.randn(rows, 16, WIDTH, generator=torch.Generator().manual_seed(1))


def _tried(model: nn.Module, *args: Tensor, **how: Any) -> Trial:
    trial = attempt(type(model).__name__, Subject(model=model, args=args or (_x(),)), **how)
    assert trial.recomputed > 0, trial
    return trial


class HooksOnce(Base):
    """Hooks that the first forward installs, as transformers does to collect router logits."""

    hooked = False

    def middle(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.second.register_forward_pre_hook(_doubled)
            self.hooked = True
        return x.sin()


def _doubled(module: nn.Module, args: tuple[Tensor]) -> Tensor:
    return args[0] * 2


def test_hooks_that_the_first_forward_installs_are_installed() -> None:
    assert _tried(HooksOnce()).kind == "graph"


class Cast(Base):
    """A cast of a module in forward, which finds it as it should be."""

    def middle(self, x: Tensor) -> Tensor:
        self.second = self.second.to(torch.float32)
        return x.sin()


def test_a_cast_that_changes_nothing_is_no_matter() -> None:
    assert _tried(Cast()).kind == "graph"


def test_a_cast_that_changes_something_is_refused_and_undone() -> None:
    model = Cast()
    model.second.double()
    with pytest.raises(CaptureError, match=r"casts or moves a module \(Linear\)"):
        autockpt.optimize(model, (_x(),), memory_budget="50%", emit="graph")
    assert model.second.weight.dtype is torch.float64


class Seeded(nn.Module):
    """Numpy's generator, seeded in forward: it is left where it was left before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        np.random.seed(3)
        return self.second((self.first(x).tanh() * float(np.random.rand())).sin())


def test_a_forward_that_seeds_numpy_is_seen_to() -> None:
    model = nn.Sequential(Seeded(), Seeded())
    model(_x())
    assert _tried(model).kind == "modules"


def _noisy() -> nn.Module:
    """rrelu packs its noise before it is drawn: a replay that stops there has none."""
    feed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(feed, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU(0.1, 0.9)))


@pytest.mark.parametrize("name", sorted(SOLVERS))
@pytest.mark.parametrize("emit", ["graph", "modules"])
def test_what_is_packed_before_it_is_filled_does_not_run_again(name: str, emit: str) -> None:
    assert _tried(_noisy(), solver=SOLVERS[name], emit=emit).kind == emit


class Unrolled(nn.Module):
    """Cells, which write their gates in place beside what they have packed."""

    def __init__(self, cell: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell, self.head = cell(32, 32), nn.Linear(32, 32)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 32)
        carried: Any = (state, state) if isinstance(self.cell, nn.LSTMCell) else state
        loss = x.new_zeros(())
        for step in x.unbind(1):
            carried = self.cell(step, carried)
            state = carried[0] if isinstance(carried, tuple) else carried
            loss = loss + torch.tanh(self.head(state)).square().mean()
        return loss


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_run_again(cell: type[nn.RNNCellBase]) -> None:
    torch.manual_seed(0)
    model, x = Unrolled(cell), torch.randn(64, 12, 32)
    planned = autockpt.optimize(model, (x,), memory_budget="50%", cost="roofline", emit="graph")
    assert planned.autockpt.report.recompute_cost > 0
    assert autockpt.verify(model, planned, (x,))


def test_tensors_overlap_where_they_share_an_element() -> None:
    whole = torch.zeros(4, 6)
    left, right = whole.chunk(2, dim=1)
    assert not overlap(left, right)
    assert not overlap(whole[:, ::2], whole[:, 1::2])
    assert not overlap(left, torch.zeros(4, 3))
    assert not overlap(whole[:0], whole)
    assert overlap(left, whole)
    assert overlap(whole[1:3], whole[2:])
    assert overlap(whole.t(), right)
    assert overlap(whole.view(torch.int32), right)


class Statistics(Base):
    """Running statistics that are neither buffers nor parameters."""

    def forward(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:  # type: ignore[override]
        y = self.first(x.flatten(0, 1)).tanh()
        y = F.batch_norm(y, mean, variance, training=True)
        return self.second(y.sin()).square().mean()


def test_statistics_among_the_arguments_move_once() -> None:
    trial = _tried(Statistics(), _x(), torch.zeros(WIDTH), torch.ones(WIDTH))
    assert trial.kind == "graph"


class Begun(Base):
    """A tensor that requires grad since something was written to it."""

    def middle(self, x: Tensor) -> Tensor:
        z = torch.zeros(x.shape)
        z[:, :8] = x[:, :8]
        z[:, 8:] = x[:, 8:] * 2
        return z.transpose(0, 1).contiguous()


class Reshaped(Base):
    """The shape of a result is changed in place."""

    def middle(self, x: Tensor) -> Tensor:
        y = x.sin()
        y.unsqueeze_(1)
        return torch.cat([y, y * 2], 1).tanh()


class Part(Base):
    """A part of a tensor is written in place."""

    def middle(self, x: Tensor) -> Tensor:
        y = x * 2
        y[:, ::2].mul_(0.5)
        y.transpose(0, 1)[3].sigmoid_()
        return y.sin()


@pytest.mark.parametrize("make", [Begun, Reshaped, Part])
def test_writes_in_place_are_counted(make: Callable[[], nn.Module]) -> None:
    model = make()
    profile = autockpt.profile(model, (_x(),))
    seen = autockpt.measure(model, (_x(),), gradients=profile.gradients)
    assert profile.peak_bytes >= seen.peak_bytes - 0.02 * seen.activation_peak_bytes
    trial = _tried(copy.deepcopy(model), budget="80%")
    assert trial.kind == "graph"


class Activated(nn.Module):
    """An activation in place on what linears over three dimensions return: a view, whole."""

    def __init__(self, activation: nn.Module, *, residual: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.activation, self.residual = activation, residual

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = self.activation(layer(x))
            x = x + y if self.residual else y
        return x.sum()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    "activation",
    [nn.ReLU(True), nn.SiLU(True), nn.Dropout(0.3, True)],
    ids=lambda module: type(module).__name__,
)
def test_a_gradient_is_let_go_of_where_nobody_else_has_it(
    activation: nn.Module, residual: bool
) -> None:
    model, x = Activated(activation, residual=residual), torch.randn(8, 32, WIDTH)
    profile = autockpt.profile(model, (x,))
    seen = autockpt.measure(model, (x,), gradients=profile.gradients)
    assert abs(profile.peak_bytes - seen.peak_bytes) <= 0.002 * seen.activation_peak_bytes


class Normed(nn.Module):
    """A norm of several steps whose gradient lies otherwise than its result, and is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.InstanceNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = x + self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x.sin().sum()


def test_a_gradient_that_is_copied_first_is_let_go_of_where_nobody_else_has_it() -> None:
    model, x = Normed(), torch.randn(8, 16, WIDTH)
    profile = autockpt.profile(model, (x,))
    seen = autockpt.measure(model, (x,), gradients=profile.gradients)
    assert profile.peak_bytes == seen.peak_bytes


class Sigmoid(torch.autograd.Function):
    """Keeps its result as an attribute of its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sigmoid()
        ctx.y = y.detach()
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.y * (1 - ctx.y)


class Positive(torch.autograd.Function):
    """Keeps its argument, and a tensor that nobody else sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask, ctx.x = x > 0, x.detach()
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.mask


class Custom(Base):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def middle(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = layer(self.function.apply(layer(x)))
        return x


@pytest.mark.parametrize("function", [Sigmoid, Positive])
def test_what_a_context_holds_lives_to_the_end(function: type[torch.autograd.Function]) -> None:
    model = Custom(function)
    profile = autockpt.profile(model, (_x(),))
    seen = autockpt.measure(model, (_x(),), gradients=profile.gradients)
    assert profile.peak_bytes == pytest.approx(seen.peak_bytes, abs=64)
    assert _tried(model, budget="90%").kind == "graph"


class Retained(Base):
    """Leaves a result whose gradient is to be read after backward."""

    def middle(self, x: Tensor) -> Tensor:
        self.seen = x.sin()
        self.seen.retain_grad()
        return self.second(self.seen).tanh()


def test_a_gradient_that_is_retained_is_there_where_modules_are_the_regions() -> None:
    model = Retained()
    with pytest.raises(CaptureError, match=r"keeps the gradient of a tensor.*test_breadth\.py"):
        autockpt.optimize(model, (_x(),), memory_budget="90%", emit="graph")
    ours: Any = autockpt.optimize(model, (_x(),), memory_budget="100%", emit="modules")
    found = []
    for either in (model, ours):
        either(_x()).backward()
        found.append(either.seen.grad)
    assert torch.equal(*found)


class Self(nn.Module):
    """Attention that looks whether query, key and value are one object."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        found: Tensor = self.attention(y, y, y)[0]
        return found.square().mean()


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_an_object_that_is_given_thrice_is_one_object_when_a_module_runs_again(name: str) -> None:
    assert _tried(Self(), solver=SOLVERS[name], emit="modules").kind == "modules"
