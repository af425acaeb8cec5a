"""Emitted forwards are the model's to the bit, whatever the regions."""

from __future__ import annotations

import gc
import linecache
import re
import traceback
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autockpt.errors import PlanError
from autockpt.rewrite.expressions import Renderer
from solvers.judge.wellformed import check_plan
from solvers.plan import Plan, Region
from tests import zoo
from tests.autockpt.plans import Captured, captured, one_region, random_plan
from tests.helpers import assert_same_bits, count_calls, peak_above_start


@pytest.fixture(scope="module", params=["gpt2", "resnet", "t5"])
def real(request: pytest.FixtureRequest) -> Captured:
    case = getattr(zoo, request.param)()
    return captured(case.model, case.args, case.kwargs, case.loss)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [1, 3])
def test_any_plan_trains_to_the_same_bits(real: Captured, seed: int, depth: int) -> None:
    plan = random_plan(real.problem, seed, depth=depth)
    check_plan(plan, real.problem)
    assert_same_bits(real.step(), real.step(real.emitted(plan)))


def test_no_region_is_the_plain_forward(real: Captured) -> None:
    assert_same_bits(real.step(), real.step(real.emitted(Plan())))
    assert count_calls(real.step) == count_calls(lambda: real.step(real.emitted(Plan())))


def test_regions_run_again(real: Captured) -> None:
    plan = one_region(real.problem)
    again = count_calls(lambda: real.step(real.emitted(plan))) - count_calls(real.step)
    products = ("aten.addmm.default", "aten.convolution.default", "aten.mm.default")
    assert any(again[name] > 0 for name in products)


def test_values_die_as_in_the_plain_forward(real: Captured) -> None:
    emitted = real.emitted(Plan())

    def peak(model: nn.Module) -> int:
        with torch.no_grad():
            return peak_above_start(lambda: model(*real.args, **real.kwargs))

    assert peak(emitted) <= peak(real.model)


def test_two_steps_in_a_row_leave_nothing_behind() -> None:
    case = zoo.resnet()
    real = captured(case.model, case.args, case.kwargs, case.loss)
    emitted = real.emitted(random_plan(real.problem, 3))
    real.step(emitted)
    gc.collect()
    gc.disable()
    try:
        tensors = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
        for _ in range(3):
            real.step(emitted)
        assert sum(issubclass(type(o), Tensor) for o in gc.get_objects()) <= tensors
    finally:
        gc.enable()


def test_nested_regions_run_as_often_as_nesting_says() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    real = captured(model, (torch.randn(3, 4),))
    inner = Region(start=0, stop=2)
    plan = Plan(regions=(Region(start=0, stop=3, children=(inner,)),))
    calls = count_calls(lambda: real.step(real.emitted(plan))) - count_calls(real.step)
    # The outer region runs ops 0 and 1 again (2 saves its input only: early stop), and so does
    # the inner one op 0.
    assert calls["aten.addmm.default"] == 3
    assert_same_bits(real.step(), real.step(real.emitted(plan)))


def test_random_state_is_kept_only_where_something_is_drawn() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4), nn.Tanh())
    real = captured(model, (torch.randn(3, 4),))
    code = real.program(Plan.flat([(0, 2), (2, 5)])).code
    assert code.count("draws=False") == 1
    assert code.count("draws=True") == 1


def test_statistics_move_once() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
    real = captured(model, (torch.randn(4, 6),))
    # The whole model, the count of batches included.
    end = next(i for i, op in enumerate(real.problem.ops) if op.target.endswith("sum"))
    for plan in (
        Plan.flat([(0, end)]),
        Plan(regions=(Region(start=0, stop=end, children=(Region(start=1, stop=3),)),)),
    ):
        code = real.program(plan).code
        assert "statistic(layer.running_mean)" in code
        assert code.count("checkpointed(") == len(list(plan.walk()))
        assert_same_bits(real.step(), real.step(real.emitted(plan)))


def test_code_can_be_read() -> None:
    case = zoo.gpt2(layers=3)
    real = captured(case.model, case.args, case.kwargs, case.loss)
    layer = [i for i, op in enumerate(real.problem.ops) if op.module.startswith("transformer.h.1")]
    plan = Plan.flat([(layer[0], layer[-1] + 1)])
    program = real.program(plan)
    assert program.regions == ("h_1",)
    assert "def h_1(self, " in program.code
    assert "checkpointed(h_1, self, " in re.sub(r"\(\s+", "(", program.code)
    assert "h = self.transformer.h[1]\n" in program.code
    assert "c_attn = h.attn.c_attn\n" in program.code
    assert "c_attn.weight" in program.code
    assert "# modeling_gpt2.py:" in program.code
    assert max(map(len, program.code.splitlines())) <= 110
    compile(program.code, "emitted", "exec")


def test_tracebacks_show_the_emitted_code() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    program = captured(model, (torch.randn(3, 4),)).program(Plan())
    with pytest.raises(RuntimeError) as caught:
        program.forward(model, torch.randn(3, 5))
    shown = "".join(traceback.format_exception(caught.value))
    assert "layer.weight" in shown
    filename = program.filename
    assert filename in linecache.cache
    del program, caught, shown
    gc.collect()
    assert filename not in linecache.cache


def test_a_region_may_not_reach_into_the_loss() -> None:
    case = zoo.resnet()
    real = captured(case.model, case.args, case.kwargs, case.loss)
    with pytest.raises(PlanError, match="loss outside the model"):
        real.program(Plan.flat([(len(real.problem.ops) - 4, len(real.problem.ops))]))


# Everything that an expression can be


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 * ctx.factor * x, None


class Zoo(nn.Module):
    """Base of the small models: square linear layers with awkward names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a-b": nn.Linear(6, 6), "3": nn.Linear(6, 6)})
        self.stack = nn.Sequential(OrderedDict(first=nn.Linear(6, 6), last=nn.Linear(6, 6)))
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(6, 6)) for _ in range(2)])
        self.add_module("class", nn.Linear(6, 6))
        self.table = {"k.v": [torch.linspace(0, 1, 6)]}
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Any:
        raise NotImplementedError


class Names(Zoo):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stack(self.layers["3"](self.layers["a-b"](x)).tanh())
        x = torch.tanh(x @ self.weights[1]) + getattr(self, "class")(x)
        return (x * self.table["k.v"][0] * self.scale).tanh()


class Operators(Zoo):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stack(x)
        y = 2 - x
        y = 1 / (y * y + 2.5) - (-0.5) ** torch.ones_like(x)
        y = -y + y.T.T + y[..., 1:5:2].sum() + y[0, None, :] + y[:, -1:]
        y = torch.where((y > float("-inf")) & ~(x == 0), y, float("nan"))
        z = torch.zeros_like(y)
        z[1:, ::2] = y[1:, ::2]
        return (z + y).clamp(min=-1e30).to(torch.float64, memory_format=torch.preserve_format)


class Several(Zoo):
    def forward(self, x: Tensor) -> Any:
        a, b, c = self.stack(x).split(2, dim=-1)
        values, places = torch.topk(b, 1)
        largest = x.max(dim=1)[0]
        first, *_ = torch.tanh(x).unbind(0)
        return {"sum": a + c, "rest": (values, places, [largest, None]), "first": first * 3}


class Recurrent(Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, _) = self.lstm(x.tanh())
        return out * h.tanh()


class Ambient(Zoo):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.stack(x).tanh()
        with torch.autocast("cpu", torch.bfloat16):
            z = self.layers["3"](x).tanh()
            with torch.autocast("cpu", enabled=False):
                z = z.float() * self.layers["a-b"](x)
        q = (z + y).view(1, 1, -1, 6)
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).tanh()


class Custom(Zoo):
    def forward(self, x: Tensor) -> Tensor:
        x = _Square.apply(self.stack(x).tanh(), 1.5)
        return x * torch.as_tensor(np.linspace(0, 1, 6, dtype=np.float32)) + self.scale


class Inplace(Zoo):
    def forward(self, x: Tensor) -> Tensor:
        h = self.stack(x)
        h.mul_(self.weights[0][0])
        h += 1
        F.relu(h, inplace=True)
        return torch.selu_(h @ self.weights[1]).tanh()


class Norms(Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.instance = nn.InstanceNorm1d(3, track_running_stats=True)
        self.cumulative = nn.BatchNorm1d(6, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stack(x)).tanh()
        x = self.instance(x.view(2, 3, -1)).reshape(-1, 6).sin()
        return self.cumulative(self.norm(x)).tanh()


MODELS = (Names, Operators, Several, Recurrent, Ambient, Custom, Inplace, Norms)


@pytest.mark.parametrize("cls", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_every_kind_of_call(cls: type[Zoo], seed: int) -> None:
    real = captured(cls(), (torch.randn(4, 6),))
    plan = random_plan(real.problem, seed) if seed else one_region(real.problem)
    assert_same_bits(real.step(), real.step(real.emitted(plan)))


def test_a_region_reads_the_tensor_that_an_attribute_held_in_forward() -> None:
    model = Names()
    real = captured(model, (torch.randn(4, 6),))
    expected = real.step()
    emitted = real.emitted(one_region(real.problem))

    def loss(output: Tensor) -> Tensor:
        model.table["k.v"][0] = torch.zeros(6)
        return output.sum().double()

    changed = Captured(model, real.args, {}, loss, real.capture, real.problem)
    assert_same_bits(expected, changed.step(emitted))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("inf"), "float('inf')"),
        (1e-12, "1e-12"),
        (-2, "-2"),
        (torch.float16, "torch.float16"),
        (torch.device("meta"), "torch.device('meta')"),
        ((1,), "(1,)"),
        ([1, (2, None)], "[1, (2, None)]"),
        (slice(1, None), "slice(1, None, None)"),
        (..., "..."),
        ("a'b", '"a\'b"'),
        (True, "True"),
        (3 + 4j, "(3+4j)"),
        (torch.channels_last, "torch.channels_last"),
        ({"k": 1}, "{'k': 1}"),
    ],
)
def test_constants_are_written_out(value: object, text: str) -> None:
    renderer = Renderer(None, {"torch": torch})
    assert renderer.value(value, {}) == text
    again = eval(text, renderer.namespace)
    assert again == value


def test_other_objects_are_bound_once() -> None:
    renderer = Renderer(None, {})
    context = nullcontext()
    name = renderer.value(context, {})
    assert renderer.value(context, {}) == name
    assert renderer.namespace[name] is context
