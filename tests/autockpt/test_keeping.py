"""Emitted regions that keep some of their ops: bits, bytes, code, and who runs again."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autockpt
from autockpt.errors import RecomputationError
from autockpt.regions.keeping import Kept
from autockpt.reports.report import make_report
from autockpt.step import measure
from autockpt.units import Budget
from solvers.judge.keeping import keepable_ops
from solvers.plan import Plan, Region
from solvers.simulate import simulate
from tests.autockpt.plans import captured
from tests.helpers import assert_same_bits, count_calls


class Attention(nn.Module):
    """Attention whose queries and keys are cheap to make: it saves them, and its own result."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(32, 96) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for into, out in zip(self.into, self.out, strict=True):
            q, k, v = into(x).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q * 2 + 1, k * 3 + 1, v, is_causal=True)
            x = x + out(y.transpose(1, 2).reshape(2, 16, 32).tanh())
        return x


@pytest.fixture
def real():
    torch.manual_seed(0)
    return captured(Attention(), (torch.randn(2, 16, 32),), {}, lambda y: y.square().sum())


def plan_of(real, *, kept=True):
    """From the first multiplication to the tanh, the attention in between kept."""
    ops = [op.target.rpartition(".")[2] for op in real.problem.ops]
    attention = [i for i, name in enumerate(ops) if name == "scaled_dot_product_attention"]
    tanh = [i for i, name in enumerate(ops) if name == "tanh"]
    starts = [[i for i, name in enumerate(ops[:a]) if name == "mul"][-2] for a in attention]
    regions = [
        Region(start=start, stop=stop + 1, kept=(a,) if kept else ())
        for start, a, stop in zip(starts, attention, tanh, strict=True)
    ]
    return Plan(regions=tuple(regions))


def test_it_does_not_run_again_and_bits_and_bytes_are_right(real):
    plan = plan_of(real)
    emitted, again = real.emitted(plan), real.emitted(plan_of(real, kept=False))
    assert_same_bits(real.step(), real.step(emitted))

    def attentions(model: nn.Module) -> int:
        calls = count_calls(lambda: real.step(model))
        return sum(n for name, n in calls.items() if "attention" in name and "backward" not in name)

    assert attentions(emitted) == attentions(real.model)
    assert attentions(again) == 2 * attentions(real.model)
    predicted, measured = simulate(real.problem, plan), measure(emitted, real.args, loss=real.loss)
    # Numbers of Python that ops save, 8 bytes each.
    assert 0 <= measured.peak_bytes - predicted.resident_peak_bytes <= 64
    less = simulate(real.problem, plan_of(real, kept=False)).recompute_cost
    assert predicted.recompute_cost < less


def test_the_code_says_so(real):
    code = real.program(plan_of(real)).code
    assert "kept(" in code
    assert "keeper()" in code
    assert ": F.scaled_dot_product_attention(" in code


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype):
    torch.manual_seed(0)
    model = Attention()
    with torch.autocast("cpu", dtype):
        real = captured(model, (torch.randn(2, 16, 32),), {}, lambda y: y.float().square().sum())
        assert_same_bits(real.step(), real.step(real.emitted(plan_of(real))))


def test_backward_twice_and_of_gradients():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return (self.lin(x * 2).exp() + x).tanh()

    torch.manual_seed(0)
    real = captured(Net(), (torch.randn(4, 8),), {}, lambda y: y.square().sum())
    end = next(i for i, op in enumerate(real.problem.ops) if op.target.endswith("tanh")) + 1
    kept = tuple(i for i in sorted(keepable_ops(real.problem)) if i in range(end))[1:]
    assert len(kept) > 2
    emitted = real.emitted(Plan(regions=(Region(start=0, stop=end, kept=kept),)))
    x = real.args[0].clone().requires_grad_()

    def gradients(model: nn.Module) -> list[Tensor]:
        loss = real.loss(model(x))
        first = torch.autograd.grad(loss, x, retain_graph=True)
        again = torch.autograd.grad(loss, x, create_graph=True)
        second = torch.autograd.grad(again[0].square().sum(), [x, *model.parameters()])
        return [*first, *again, *second]

    for a, b in zip(gradients(real.model), gradients(emitted), strict=True):
        assert torch.equal(a, b)


def test_compiled():
    torch.manual_seed(0)
    model = Attention(4)
    x = torch.randn(2, 16, 32)
    plan = captured(model, (x,), {}, lambda y: y.sum())
    given = plan_of(plan)
    found = autockpt.optimize(model, (x,), memory_budget="100%", plan=given, loss=Tensor.sum)
    assert any(region.kept for region in found.autockpt.plan.regions)
    plain = torch.compile(copy.deepcopy(model), backend="aot_eager")
    compiled = torch.compile(found, backend="aot_eager", fullgraph=True)
    for module in (plain, compiled):
        module(x).sum().backward()
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_the_report_adds_up(real):
    plan = plan_of(real)
    found, plain = simulate(real.problem, plan), simulate(real.problem, Plan())
    report = make_report(real.problem, plan, found, plain, budget=Budget(peak_bytes=1, text="50%"))
    assert sum(row.recompute_cost for row in report.regions) == found.recompute_cost


class Conjugated(nn.Module):
    """One storage under two views that differ in a bit, not in strides."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        f = torch.fft.rfft(self.lin(x).tanh())
        return (f * f.conj()).real.exp() + torch.view_as_real(f).sum(-1)


def test_views_that_differ_in_more_than_strides():
    torch.manual_seed(0)
    real = captured(Conjugated(), (torch.randn(4, 8),), {}, lambda y: y.square().sum())
    end = next(i for i, op in enumerate(real.problem.ops) if op.target.endswith("square"))
    allowed = keepable_ops(real.problem)
    kept = tuple(i for i in range(end) if i in allowed)
    assert any(real.problem.ops[i].target.endswith("mul") for i in kept)
    for chosen in (kept, *((i,) for i in kept)):
        emitted = real.emitted(Plan(regions=(Region(start=0, stop=end, kept=chosen),)))
        assert_same_bits(real.step(), real.step(emitted))


def test_what_is_kept_is_never_a_result_of_the_model(real):
    problem = real.problem
    results = {problem.values[v].storage for v in problem.outputs}
    for index in keepable_ops(problem):
        assert problem.values[problem.ops[index].outputs[0]].storage not in results


def test_writing_to_what_is_kept_raises():
    class Exponential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x).exp()
            return (y * y).tanh()

    torch.manual_seed(0)
    real = captured(Exponential(), (torch.randn(4, 8),), {}, lambda y: y.square().sum())
    ops = [op.target.rpartition(".")[2] for op in real.problem.ops]
    kept = ops.index("exp")
    emitted = real.emitted(
        Plan(regions=(Region(start=0, stop=ops.index("tanh") + 1, kept=(kept,)),))
    )
    held: list[Tensor] = []
    keep = Kept.hold

    def noting(self: Kept, result: Tensor) -> None:
        held.append(result)
        keep(self, result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kept, "hold", noting)
        loss = real.loss(emitted(*real.args))
    with torch.no_grad():
        held[-1].mul_(2)
    with pytest.raises(RecomputationError, match="modified by an inplace operation"):
        loss.backward()
