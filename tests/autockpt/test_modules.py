"""Regions that are calls of modules: the model's own Python runs, and its bits stay."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autockpt
from autockpt import CaptureError, FallbackWarning
from solvers import Plan
from solvers.plan import Region
from solvers.problem import Problem


class Block(nn.Module):
    """A block whose middle is worth forgetting."""

    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.act(self.up(x))))


class Stack(nn.Module):
    """Blocks, and what a subclass does around them."""

    def __init__(self, depth: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Branches(Stack):
    """What runs is decided by the values of each batch."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if float(x.mean()) > 0 else x - 0.5 * block(-x)
            while x.abs().max() > 8:
                x = x * 0.5
        return x


class Numpy(Stack):
    """Numpy and Python draw, inside a block and around it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Noisy() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * random.random()
        return super().forward(x) + torch.from_numpy(np.random.rand(32)).float()


class _Noisy(Block):
    def forward(self, x: Tensor) -> Tensor:
        keep = torch.as_tensor(np.random.rand(*x.shape) > 0.1)
        return super().forward(x * keep * (1 + random.random()))


class Counting(Stack):
    """Blocks count their calls, and what they compute depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Counting() for _ in range(4))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x)


class _Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[int] = []
        self.register_buffer("ema", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        y = super().forward(x) * (1 + 1 / self.calls) + self.ema * len(self.seen)
        with torch.no_grad():
            self.ema.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
        return y


class LayerDrop(Stack):
    """A layer is left out by a draw of numpy's."""

    def __init__(self) -> None:
        super().__init__(depth=5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or np.random.rand() > 0.3:
                x = block(x)
        return x


class Shared(Stack):
    """One block is called again and again."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.blocks[:2]:
                x = block(x)
        return x


class Normed(Stack):
    """Running statistics, and a list that every block appends to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Normed() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for block in self.blocks:
            x = block(x, kept)
        return torch.stack(kept).sum(0) + x


class _Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        y = super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2)).relu_()
        kept.append(y)
        return y * len(kept)


MODELS: list[Callable[[], nn.Module]] = [
    Stack,
    Branches,
    Numpy,
    Counting,
    LayerDrop,
    Shared,
    Normed,
]


def _x(seed: int = 1) -> Tensor:
    return torch.randn(8, 128, 32, generator=torch.Generator().manual_seed(seed))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _loop(model: nn.Module, steps: int, seed: int = 3) -> list[Any]:
    """Train a few steps and return all that they leave behind."""
    _seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    left: list[Any] = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(_x(step)).square().mean()
        loss.backward()
        left += [loss.detach().clone()]
        left += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        left += [buffer.clone() for buffer in model.buffers()]
        optimizer.step()
    left += [p.detach().clone() for p in model.parameters()]
    left += [torch.get_rng_state(), random.random(), np.random.rand()]
    for module in model.modules():
        left += [v for k, v in vars(module).items() if k in ("calls", "seen", "steps")]
    return left


def _assert_same(expected: list[Any], found: list[Any]) -> None:
    assert len(expected) == len(found)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if isinstance(one, Tensor):
            assert torch.equal(one, other), number
        else:
            assert one == other, number


def whole_blocks(problem: Problem, budget_bytes: int) -> Plan:
    """A solver: every block of a list is a region, and its linear layer is one inside."""
    assert problem.spans is not None
    regions: list[Region] = []
    for span in problem.spans:
        path = span.name.partition(":")[0]
        if path.count(".") == 1:
            inner = [s for s in problem.spans if s.name.partition(":")[0] == f"{path}.down"]
            inside = tuple(
                Region(start=s.start, stop=s.stop, module=s.name)
                for s in inner
                if span.start <= s.start and s.stop <= span.stop
            )
            regions.append(
                Region(start=span.start, stop=span.stop, children=inside, module=span.name)
            )
    return Plan(regions=tuple(regions), solver="whole_blocks")


@pytest.mark.parametrize("solver", ["auto", whole_blocks], ids=["auto", "blocks"])
@pytest.mark.parametrize("build", MODELS, ids=lambda b: b.__name__)
def test_the_same_bits_and_the_same_python_state(
    build: Callable[[], nn.Module], solver: Any
) -> None:
    _seed(0)
    plain = build().train()
    ours = autockpt.optimize(
        copy.deepcopy(plain),
        (_x(),),
        memory_budget="60%",
        emit="modules",
        cost="roofline",
        solver=solver,
    )
    found = _loop(ours, 4)
    assert ours.autockpt.report.recompute_cost > 0
    if solver is whole_blocks:
        assert "blocks.1\n" in ours.autockpt.code or "blocks.1:1\n" in ours.autockpt.code
    _assert_same(_loop(plain, 4), found)


@pytest.mark.parametrize("build", [Branches, Numpy, Counting, LayerDrop], ids=lambda b: b.__name__)
def test_auto_falls_back_and_says_so_once(build: Callable[[], nn.Module]) -> None:
    _seed(0)
    plain = build().train()
    ours = autockpt.optimize(copy.deepcopy(plain), memory_budget="50%", cost="roofline")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _loop(ours, 8)
    told = [w for w in caught if w.category is FallbackWarning]
    assert len(told) == 1
    assert "regions are calls of its modules" in str(told[0].message)
    assert any("Regions are calls of modules" in note for note in ours.autockpt.report.notes)
    assert ours.autockpt.over_modules
    _assert_same(_loop(plain, 8), found)


@pytest.mark.parametrize("build", [Numpy, Counting], ids=lambda b: b.__name__)
def test_graph_refuses(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(CaptureError):
        autockpt.optimize(build(), (_x(),), memory_budget="50%", emit="graph")


def test_modules_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        autockpt.optimize(Numpy(), (_x(),), memory_budget="50%", emit="modules", cost="roofline")
