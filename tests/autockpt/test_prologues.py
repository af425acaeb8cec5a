"""Emitted regions that make inputs again rather than hold them: bits, bytes and code."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from torch import Tensor, nn

import autockpt
from autockpt.reports.report import make_report
from autockpt.step import measure
from autockpt.units import Budget
from solvers.judge.prologue import repeatable_ops
from solvers.plan import Plan, Region
from solvers.simulate import simulate
from tests.autockpt.plans import captured
from tests.helpers import assert_same_bits


class Gelu(nn.Module):
    """GELU by tanh, as GPT-2 has it: ``x / 2`` waits for the tanh."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 64) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(64, 16) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            y = up(x)
            half = 0.5 * y
            inner = math.sqrt(2 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))
            x = x + down(half * (1.0 + torch.tanh(inner)))
        return x


@pytest.fixture
def real():
    torch.manual_seed(0)
    model = Gelu()
    return captured(model, (torch.randn(32, 16),), {}, lambda y: y.square().sum())


def plan_of(real):
    """The end of each GELU is a region that halves its input again."""
    ops = [op.target.rpartition(".")[2] for op in real.problem.ops]
    tanh = [i for i, name in enumerate(ops) if name == "tanh"]
    halves = [i for i, name in enumerate(ops) if name in ("mul", "rmul", "__rmul__")][::4]
    linears = [i for i, name in enumerate(ops) if name == "linear"][1::2]
    regions = [
        Region(start=t + 1, stop=stop + 1, prologue=(half,))
        for t, half, stop in zip(tanh, halves, linears, strict=True)
    ]
    return Plan(regions=tuple(regions))


def test_half_is_not_held_and_bits_are_equal(real):
    plan = plan_of(real)
    without = Plan.flat([(region.start, region.stop) for region in plan.regions])
    emitted = real.emitted(plan)
    assert_same_bits(real.step(), real.step(emitted))
    predicted = simulate(real.problem, plan)
    measured = measure(emitted, real.args, loss=real.loss)
    held = measure(real.emitted(without), real.args, loss=real.loss)
    # Numbers of Python that ops save, 8 bytes each.
    assert 0 <= measured.peak_bytes - predicted.resident_peak_bytes <= 64
    assert held.peak_bytes - measured.peak_bytes >= 32 * 64 * 4


def test_code_says_what_is_made_again(real):
    code = real.program(plan_of(real)).code
    assert re.search(r"def \w+_again\(self, linear\w*\):\n    \w+ = \w+ \* 0.5", code), code
    assert re.search(r"again = remade\(\w+_again, mul\w*\)\n    del mul", code), code
    assert re.search(r"def \w+\(self, again, tanh, linear\):", code), code


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype):
    torch.manual_seed(0)
    model = Gelu()
    x = torch.randn(32, 16)

    def loss(y: Tensor) -> Tensor:
        return y.float().square().sum()

    with torch.autocast("cpu", dtype):
        real = captured(model, (x,), {}, loss)
        assert_same_bits(real.step(), real.step(real.emitted(plan_of(real))))
        # What makes the casts that autocast keeps would keep others.
        linear = next(i for i, op in enumerate(real.problem.ops) if op.target.endswith("linear"))
        assert linear not in repeatable_ops(real.problem)


def test_backward_twice_and_of_gradients(real):
    emitted = real.emitted(plan_of(real))
    x = real.args[0].clone().requires_grad_()

    def gradients(model: nn.Module) -> list[Tensor]:
        loss = real.loss(model(x))
        first = torch.autograd.grad(loss, x, retain_graph=True)
        again = torch.autograd.grad(loss, x, create_graph=True)
        second = torch.autograd.grad(again[0].square().sum(), [x, *model.parameters()])
        return [*first, *again, *second]

    plain, found = gradients(real.model), gradients(emitted)
    for a, b in zip(plain, found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    torch.manual_seed(0)
    model = Gelu(blocks=4)
    x = torch.randn(64, 16)
    plain = torch.compile(copy.deepcopy(model), backend=backend)
    found = autockpt.optimize(model, (x,), memory_budget="70%", cost=lambda work: work.flops + 1)
    assert any(region.prologue for region in found.autockpt.plan.regions)
    compiled = torch.compile(found, backend=backend)
    for module in (plain, compiled):
        module(x).square().sum().backward()
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_the_report_counts_what_runs_first(real):
    plan = plan_of(real)
    found = simulate(real.problem, plan)
    plain = simulate(real.problem, Plan())
    report = make_report(real.problem, plan, found, plain, budget=Budget(peak_bytes=1, text="50%"))
    assert sum(row.recompute_cost for row in report.regions) == found.recompute_cost
    assert all(row.source.startswith("test_prologues.py:") for row in report.regions)


class Spectral(nn.Module):
    """Conjugates that are cheap to make again, next to regions that make what they read."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.lin = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.w = nn.ParameterList(
            nn.Parameter(torch.randn(17, dtype=torch.cfloat)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for lin, w in zip(self.lin, self.w, strict=True):
            f = torch.fft.rfft(lin(x))
            f = f * w * f.conj().exp()
            x = x + torch.fft.irfft(f, n=x.shape[-1]).tanh()
        return x


@pytest.mark.parametrize("budget", ["80%", "75%", "70%"])
def test_no_search_moves_a_region_over_what_a_prologue_reads(budget):
    torch.manual_seed(0)
    found = autockpt.optimize(
        Spectral(4), (torch.randn(4, 48, 32),), memory_budget=budget, cost="roofline"
    )
    assert found.autockpt.plan.regions
