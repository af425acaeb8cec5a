"""Random trees of modules, random sets of their calls as regions: bits, and peaks as predicted."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autockpt
from solvers.plan import Plan, Region
from solvers.problem import Problem
from tests.helpers import assert_same_bits, run_case
from tests.zoo import Case

WIDTH = 16
STEPS = (
    *("child", "child", "child", "linear", "gelu", "norm", "dropout", "residual", "batch norm"),
    *("relu_", "add_", "chunks", "again", "count", "ema", "numpy", "branch", "append", "attribute"),
    *("no grad", "view", "shared", "checked"),
)


class Tree(nn.Module):
    """A module of random steps; some call children, some do what a graph cannot hold."""

    def __init__(self, rng: random.Random, depth: int, shared: nn.Module) -> None:
        super().__init__()
        self.steps = [rng.choice(STEPS) for _ in range(rng.randint(2, 6))]
        deeper = depth > 0
        self.children_ = nn.ModuleList(
            Tree(rng, depth - 1, shared) if deeper and rng.random() < 0.8 else Leaf(rng)
            for _ in self.steps
        )
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("ema", torch.zeros(WIDTH))
        self.shared = shared
        self.calls = 0

    def forward(self, x: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        seen = [] if seen is None else seen
        first = x = x + self.linear(x)
        for index, step in enumerate(self.steps):
            x = self.run(step, index, x, first, seen)
        return x if not seen else x + seen[-1].mean()

    def run(self, step: str, index: int, x: Tensor, first: Tensor, seen: list[Tensor]) -> Tensor:
        child = self.children_[index]
        if step == "child":
            return x + child(x, seen=seen)
        if step == "again":
            return child(child(x), seen)
        if step == "count":
            self.calls += 1
            return x * (1 + 1 / self.calls)
        if step == "ema":
            with torch.no_grad():
                self.ema.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return x + self.ema
        if step == "append":
            seen.append(x.sin())
            return x * len(seen)
        if step == "attribute":
            self.last = x.tanh()
            return self.last * 2
        if step == "branch":
            return x.exp().clamp(max=3) if float(torch.rand(())) < 0.7 else x.sin()
        if step == "checked":
            return x * 0.5 if bool(x.detach().abs().max() > 3) else x + 1
        return self.plain(step, x, first)

    def plain(self, step: str, x: Tensor, first: Tensor) -> Tensor:
        ops: dict[str, Any] = {
            "linear": lambda: self.linear(x),
            "gelu": lambda: F.gelu(x),
            "norm": lambda: self.norm(x),
            "dropout": lambda: F.dropout(x, 0.3),
            "residual": lambda: x + first,
            "batch norm": lambda: self.batch_norm(x),
            "relu_": lambda: (x + 1).relu_(),
            "add_": lambda: (x * 2).add_(first),
            "chunks": lambda: torch.cat(x.chunk(2, 1)[::-1], 1).sigmoid(),
            "numpy": lambda: x * float(np.random.rand()) + random.random(),
            "no grad": lambda: x + x.detach().cos(),
            "view": lambda: x.view(2, -1, WIDTH).flip(0).view(-1, WIDTH),
            "shared": lambda: self.shared(x),
        }
        return ops[step]()  # type: ignore[no-any-return]


class Leaf(nn.Module):
    """Saves much, costs little."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, rng.choice([16, 64]))
        self.down = nn.Linear(self.up.out_features, WIDTH)

    def forward(self, x: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def random_plan(problem: Problem, rng: random.Random) -> Plan:
    """Some of the spans that may be regions, nested as they are."""
    assert problem.spans is not None
    chosen = [span for span in problem.spans if rng.random() < 0.4]

    def nest(spans: list[Any]) -> tuple[Region, ...]:
        made = []
        while spans:
            span, *rest = spans
            inside = [other for other in rest if other.stop <= span.stop]
            spans = rest[len(inside) :]
            made.append(
                Region(start=span.start, stop=span.stop, children=nest(inside), module=span.name)
            )
        return tuple(made)

    return Plan(regions=nest(chosen))


@pytest.mark.parametrize("seed", range(10))
def test_random_trees(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Tree(rng, 2, nn.Linear(WIDTH, WIDTH)).train()
    x = torch.randn(512, WIDTH)
    options: dict[str, Any] = {"memory_budget": 10**12, "emit": "modules", "cost": "roofline"}

    def step(which: nn.Module) -> Any:
        random.seed(seed)
        np.random.seed(seed)
        before = {name: m.calls for name, m in which.named_modules() if isinstance(m, Tree)}
        found = run_case(Case(which, (x,), {}, lambda y: y.square().mean()), seed=seed)
        after = [m.calls for m in which.modules() if isinstance(m, Tree)], random.random()
        for name, calls in before.items():
            which.get_submodule(name).calls = calls
        return found, after

    random.seed(seed)
    np.random.seed(seed)
    problem = autockpt.optimize(model, (x,), **options).autockpt.problem
    expected, state = step(model)
    for _ in range(3):
        plan = random_plan(problem, rng)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        ours: Any = autockpt.optimize(model, (x,), plan=plan, **options)
        found, now = step(ours)
        assert_same_bits(expected, found)
        assert state == now
