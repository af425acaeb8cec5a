"""Emitted regions whose recomputation leaves ops out: bits, bytes, code, and what runs again."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autockpt
from autockpt.rewrite import rewrite
from autockpt.step import measure
from solvers.plan import Plan, Region
from solvers.simulate import idle_ops, simulate
from tests.autockpt.plans import Emitted, captured
from tests.helpers import assert_same_bits, count_calls


class Heads(nn.Module):
    """A norm that three matmuls read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).view(2, 16, 4, 8).transpose(1, 2) for part in self.parts)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(z.transpose(1, 2).reshape(2, 16, 32))


@pytest.fixture
def real():
    torch.manual_seed(0)
    x = torch.randn(2, 16, 32, requires_grad=True)
    return captured(Heads(), (x,), {}, lambda y: y.square().sum())


def plan_of(real, *, nested: bool = False) -> Plan:
    """From the norm to the last of the three matmuls; the first in a region of its own."""
    ops = [op.target.rpartition(".")[2] for op in real.problem.ops]
    linears = [i for i, name in enumerate(ops) if name == "linear"]
    first, _, last, _ = linears
    region = Region(start=ops.index("layer_norm"), stop=last + 1)
    if nested:
        region = replace(region, children=(Region(start=first, stop=first + 3),))
    return Plan(regions=(region,))


@pytest.mark.parametrize("nested", [False, True])
def test_matmuls_do_not_run_again_and_bits_and_bytes_are_right(real, nested):
    plan = plan_of(real, nested=nested)
    emitted = real.emitted(plan)
    assert_same_bits(real.step(), real.step(emitted))

    def matmuls(model: nn.Module) -> int:
        calls = count_calls(lambda: real.step(model))
        return sum(n for name, n in calls.items() if "addmm" in name)

    # The region inside ends in its matmul, which does not run to its end either.
    assert matmuls(emitted) == matmuls(real.model) > 0
    predicted = simulate(real.problem, plan)
    measured = measure(emitted, real.args, loss=real.loss)
    assert measured.peak_bytes == predicted.resident_peak_bytes


def test_the_code_says_so(real):
    code = real.program(plan_of(real)).code
    idle = idle_ops(real.problem, plan_of(real)).values()
    left_out = re.findall(r"= (?:skipped\(|None if replay else )", code)
    assert len(left_out) == sum(map(len, idle)) > 2
    assert ": F.linear(" in code
    assert ": checkpointed(" in real.program(plan_of(real, nested=True)).code


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype):
    torch.manual_seed(0)
    model = Heads()
    with torch.autocast("cpu", dtype):
        real = captured(model, (torch.randn(2, 16, 32),), {}, lambda y: y.float().square().sum())
        assert_same_bits(real.step(), real.step(real.emitted(plan_of(real))))


@pytest.mark.parametrize("nested", [False, True])
def test_backward_twice_and_of_gradients(nested):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = (x * 2).tanh()
            a, b, c = (part(y) for part in self.parts)
            return (a.sin() * b.exp() + c).tanh()

    torch.manual_seed(0)
    real = captured(Net(), (torch.randn(4, 8),), {}, lambda y: y.square().sum())
    ops = [op.target.rpartition(".")[2] for op in real.problem.ops]
    linears = [i for i, name in enumerate(ops) if name == "linear"]
    region = Region(start=0, stop=linears[2] + 1)
    if nested:
        region = replace(region, children=(Region(start=linears[0], stop=linears[1] + 1),))
    assert len(idle_ops(real.problem, Plan(regions=(region,)))[region]) >= 2
    plan = Plan(regions=(region,))
    emitted = real.emitted(plan)
    assert ("results=2" in real.program(plan).code) == nested
    x = real.args[0].clone().requires_grad_()

    def gradients(model: nn.Module) -> list[Tensor]:
        loss = real.loss(model(x))
        first = torch.autograd.grad(loss, x, retain_graph=True)
        again = torch.autograd.grad(loss, x, create_graph=True)
        second = torch.autograd.grad(again[0].square().sum(), [x, *model.parameters()])
        return [*first, *again, *second]

    for a, b in zip(gradients(real.model), gradients(emitted), strict=True):
        assert torch.equal(a, b)


def compact(tensor: Tensor) -> Tensor:
    """As ``save_on_cpu(pin_memory=True)`` packs: other strides than the tensor had."""
    return torch.empty(tensor.size(), dtype=tensor.dtype).copy_(tensor.detach())


@pytest.mark.parametrize("pack", [compact, torch.clone])
@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.t(),
        lambda y: y[:, 4:12],
        lambda y: y[::2],
        lambda y: y[:1].expand(8, 16),
    ],
)
def test_hooks_that_give_back_tensors_that_lie_otherwise(view, pack):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.parts = nn.ModuleList(nn.LazyLinear(8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = view(self.first(x))
            a, b, c = (part(y) for part in self.parts)
            return (a.sin() * b.exp() + c).tanh()

    torch.manual_seed(0)
    model, x = Net(), torch.randn(16, 16)
    model(x)
    real = captured(model, (x,), {}, lambda y: y.square().sum())
    ops = [op.target.rpartition(".")[2] for op in real.problem.ops]
    linears = [i for i, name in enumerate(ops) if name == "linear"]
    plan = Plan(regions=(Region(start=linears[1], stop=linears[3] + 1),))
    assert len(idle_ops(real.problem, plan)[plan.regions[0]]) >= 2
    # What a matmul reads lies otherwise under such hooks, which may round otherwise: the same plan
    # is the measure, with nothing left out.
    whole = Emitted(model, real.capture, rewrite(real.capture, plan, root=model))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert_same_bits(real.step(whole), real.step(real.emitted(plan)))


def test_a_view_of_what_was_there_before_the_step_in_a_region_inside():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 16))
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            part = self.weight[:16]
            return (h @ part + h).tanh()

    torch.manual_seed(0)
    real = captured(Net(), (torch.randn(16, 16),), {}, lambda y: y.square().sum())
    ops = [op.target.rpartition(".")[2] for op in real.problem.ops]
    inner = Region(start=1, stop=2)
    plan = Plan(regions=(Region(start=0, stop=ops.index("matmul") + 1, children=(inner,)),))
    assert_same_bits(real.step(), real.step(real.emitted(plan)))


def test_compiled(real):
    model, x = real.model, real.args[0].detach()
    given = plan_of(captured(model, (x,), {}, lambda y: y.sum()))
    found = autockpt.optimize(model, (x,), memory_budget="100%", plan=given, loss=Tensor.sum)
    assert "skipped(" in found.autockpt.code.partition("def ")[2]
    plain = torch.compile(copy.deepcopy(model), backend="aot_eager")
    compiled = torch.compile(found, backend="aot_eager", fullgraph=True)
    for module in (plain, compiled):
        module(x).sum().backward()
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
