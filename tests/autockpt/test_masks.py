"""Dropout taken apart: the draw is kept as booleans, and bits, draws and bytes are right."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autockpt
from autockpt.capture.bits import identical
from autockpt.capture.mask_parts import SHOWN
from autockpt.capture.masks import Masks
from autockpt.pipeline import lower_step
from autockpt.reports.region_rows import region_rows
from autockpt.step import measure
from solvers.judge.keeping import keepable_ops
from solvers.plan import Plan, Region
from solvers.simulate import simulate
from tests.autockpt.plans import captured
from tests.costs import dear_draws
from tests.helpers import assert_same_bits, count_calls


class Net(nn.Module):
    """Attention and layers with dropout, and no other draws."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.dropout(self.into(x).tanh()).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0)
        return self.dropout(self.out(y.transpose(1, 2).reshape(2, 16, 32)).tanh()) + x


def total(y: Tensor) -> Tensor:
    return y.float().square().sum()


@pytest.fixture
def real():
    torch.manual_seed(0)
    return captured(Net().train(), (torch.randn(2, 16, 32),), {}, total)


def whole(real, kept: str = "") -> Plan:
    """One region around the model, with the ops kept whose name ends so."""
    ops = real.problem.ops
    stop = 1 + max(i for i, op in enumerate(ops) if op.target == "torch.dropout")
    named = [i for i in range(stop) if kept and ops[i].target.endswith(kept)]
    return Plan(regions=(Region(start=0, stop=stop, kept=tuple(named)),))


def test_draws_are_ops_of_their_own_whose_results_are_booleans(real):
    problem = real.problem
    draws = [op for op in problem.ops if op.random]
    assert len(draws) == 3
    sizes = [problem.storages[problem.values[op.outputs[0]].storage].nbytes for op in draws]
    assert sizes == [2 * 16 * 96, 2 * 4 * 16 * 16, 2 * 16 * 32]
    assert all(problem.ops.index(op) in keepable_ops(problem) for op in draws)


def test_with_masks_kept_nothing_is_drawn_again(real):
    kept, again = real.emitted(whole(real, ".draw")), real.emitted(whole(real))
    assert 'draws="kept"' in real.program(whole(real, ".draw")).code
    for model, times in ((kept, 1), (again, 2)):
        assert_same_bits(real.step(), real.step(model))
        calls = count_calls(lambda model=model: real.step(model))
        assert sum(n for name, n in calls.items() if "bernoulli" in name) == 3 * times


def test_the_report_says_what_draws_again_and_what_masks_take(real):
    problem = real.problem
    around = {"depth": 0, "start": 0, "stop": len(problem.ops)}
    plans = whole(real), whole(real, ".draw")
    again, kept = (next(region_rows(problem, plan.regions, **around)) for plan in plans)
    assert (again.random, again.kept, kept.random, kept.kept) == (True, 0, False, 3)
    masks = 2 * 16 * 96 + 2 * 4 * 16 * 16 + 2 * 16 * 32
    assert again.freed_bytes - kept.freed_bytes == masks - problem.random_state_bytes


@pytest.mark.parametrize("kept", ["", ".draw"])
def test_the_peak_is_as_predicted(real, kept):
    plan = whole(real, kept)
    predicted = simulate(real.problem, plan).resident_peak_bytes
    measured = measure(real.emitted(plan), real.args, loss=real.loss).peak_bytes
    assert 0 <= measured - predicted <= 64


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


CALLS = {
    "causal": ((heads(2, 4, 6, 8),) * 3, {"is_causal": True}),
    "booleans": ((heads(2, 4, 6, 8),) * 3, {"attn_mask": torch.rand(6, 6) > 0.2}),
    "all hidden": ((heads(2, 4, 6, 8),) * 3, {"attn_mask": torch.zeros(6, 6, dtype=torch.bool)}),
    "trained bias": ((heads(2, 4, 6, 8),) * 3, {"attn_mask": heads(1, 4, 6, 6)}),
    "negative scale": ((heads(2, 4, 6, 8),) * 3, {"scale": -0.5}),
    "cross": ((heads(2, 4, 6, 8), heads(2, 4, 9, 8), heads(2, 4, 9, 10)), {}),
    "grouped": (
        (heads(2, 4, 6, 8), heads(2, 2, 6, 8), heads(2, 2, 6, 8)),
        {"enable_gqa": True},
    ),
    "half": ((heads(2, 4, 6, 8, dtype=torch.bfloat16),) * 3, {}),
    "turned": ((heads(2, 6, 4, 8).transpose(1, 2),) * 3, {}),
    "no heads": ((heads(6, 8),) * 3, {}),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_attention_comes_apart_to_the_bit(name, autocast):
    tensors, settings = CALLS[name]
    kwargs = {"dropout_p": 0.25, **settings}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        made = {
            k: v + 0.0 if k == "attn_mask" and v.requires_grad else v for k, v in kwargs.items()
        }
        same_step([t + 0.0 for t in tensors], made)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shared", ["qkv", "kv", "views"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_shared_input_are_added_up_in_the_same_order(dtype, shared, autocast):
    x = (5 * torch.randn(2, 4, 16, 8)).to(dtype).requires_grad_()
    y = (5 * torch.randn(2, 8, 16, 8)).to(dtype).requires_grad_()
    kwargs = {"dropout_p": 0.25, "is_causal": True, "enable_gqa": shared == "kv"}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        kind = Masks().steps(F.scaled_dot_product_attention, (x + 0, x + 0, x + 0), kwargs)
    assert kind is not None

    def step(run):
        torch.manual_seed(1)
        base = x + 0.0
        tensors = {
            "qkv": lambda: (base, base, base),
            "kv": lambda: (y + 0.0, base, base),
            "views": lambda: (base.view(2, 4, 16, 8), base * 1.0, base.view(2, 4, 16, 8)),
        }[shared]()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = run(*tensors, **kwargs)
        return [result, torch.autograd.grad(total(result), x)[0]]

    def apart(*args, **named):
        return kind(lambda f, *a: f(*a), *args, **named)

    for left, right in zip(step(F.scaled_dot_product_attention), step(apart), strict=True):
        assert identical(left, right)


def same_step(tensors, kwargs):
    steps = Masks().steps(F.scaled_dot_product_attention, tensors, kwargs)
    assert steps is not None

    def step(run):
        torch.manual_seed(1)
        result = run(*tensors, **kwargs)
        bias = kwargs.get("attn_mask")
        trained = [*tensors, *([bias] if bias is not None and bias.requires_grad else [])]
        return [result, *torch.autograd.grad(total(result), trained), torch.get_rng_state()]

    def apart(*args, **named):
        return steps(lambda f, *a: f(*a), *args, **named)

    expected = step(F.scaled_dot_product_attention)
    found = step(apart)
    for left, right in zip(expected, found, strict=True):
        assert identical(left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.5, math.nextafter(1.0, 0.0)])
def test_dropout_comes_apart_to_the_bit(dtype, p):
    x = torch.randn(5, 7, 3).to(dtype).permute(2, 0, 1).requires_grad_()
    steps = Masks().steps(torch.dropout, (x, p, True), {})
    assert steps is not None
    torch.manual_seed(3)
    expected = torch.dropout(x, p, True)
    torch.manual_seed(3)
    found = steps(lambda f, *a: f(*a), x, p, True)
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)
    left, right = (torch.autograd.grad(total(y), x)[0] for y in (expected, found))
    assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("p", "train", "trained"),
    [(0.0, True, True), (1.0, True, True), (0.5, False, True), (0.5, True, False)],
)
def test_what_saves_no_noise_stays_whole(p, train, trained):
    x = torch.randn(3, 4, requires_grad=trained)
    assert Masks().steps(torch.dropout, (x, p, train), {}) is None


def test_attention_without_dropout_stays_whole():
    tensors = (heads(2, 4, 6, 8),) * 3
    assert Masks().steps(F.scaled_dot_product_attention, tensors, {}) is None


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kept", ["", ".draw"])
def test_compiled_it_draws_as_the_plain_model_compiled_does(autocast, kept):
    torch.manual_seed(0)
    model, x = Net().train(), torch.randn(2, 16, 32)

    def step(wrap):
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            run = torch.compile(wrap(own), backend="aot_eager", fullgraph=True)
            torch.manual_seed(5)
            loss = total(run(x))
        loss.backward()
        return [loss.detach(), *(p.grad for p in own.parameters()), torch.get_rng_state()]

    def planned(own):
        plan = whole(captured(own, (x,), {}, total), kept)
        return autockpt.optimize(own, (x,), loss=total, memory_budget=1 << 30, plan=plan)

    for left, right in zip(step(lambda own: own), step(planned), strict=True):
        assert torch.equal(left, right)


def test_half_of_the_activations_of_a_layer_with_dropout_without_a_second_draw():
    """With times as the cost, masks are kept wherever a draw takes longer than its bytes."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    layers = [nn.Sequential(layer, nn.Linear(256, 64)) for layer in layers]
    model = nn.Sequential(*layers).train()
    real = captured(model, (torch.randn(512, 64),), {}, total)
    made = autockpt.optimize(
        copy.deepcopy(model),
        real.args,
        loss=total,
        memory_budget="60%",
        cost=lambda work: 1_000_000 if ".draw" in work.target else 1 + work.output_bytes,
    )
    calls = count_calls(lambda: real.step(made))
    assert made.autockpt.plan.regions
    assert sum(n for name, n in calls.items() if "bernoulli" in name) == 3
    assert_same_bits(real.step(), real.step(made))


def test_attention_of_several_steps_is_not_kept():
    """Its backward lets go of what it hides bit by bit: kept, all of that would stay."""
    _, problem = lower_step(Net().train(), (torch.randn(2, 16, 32),), {}, total, "roofline")
    (attention,) = (i for i, op in enumerate(problem.ops) if op.target.endswith("attention"))
    assert attention not in keepable_ops(problem)


def test_what_lies_between_the_products_of_attention_runs_again_alone(real):
    """With weights and mask kept, noise and its product with the weights are made again."""
    ops = real.problem.ops
    first = next(i for i, op in enumerate(ops) if op.target.endswith("attention.draw"))
    last = next(i for i, op in enumerate(ops) if op.target.endswith("attention"))
    kept = [
        i for i in range(first, last + 1) if ops[i].target.endswith((".draw", "weights", "tion"))
    ]
    assert len(kept) == 3
    plan = Plan(regions=(Region(start=first, stop=last + 1, kept=tuple(kept)),))
    again = count_calls(lambda: real.step(real.emitted(plan))) - count_calls(real.step)
    assert again["aten.bmm.default"] == again["aten.bernoulli_.float"] == 0
    assert again["aten.mul.Tensor"] > 0
    assert_same_bits(real.step(), real.step(real.emitted(plan)))
    predicted = simulate(real.problem, plan).resident_peak_bytes
    measured = measure(real.emitted(plan), real.args, loss=real.loss).peak_bytes
    assert 0 <= measured - predicted <= 64


def test_another_precision_of_composed_attention_is_another_step():
    torch.manual_seed(0)
    model, x = Net().train().bfloat16(), torch.randn(2, 16, 32).bfloat16()
    made = autockpt.optimize(copy.deepcopy(model), (x,), loss=total, memory_budget="100%")
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    try:
        for reduces in (not before, before):
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(reduces)
            found = []
            for own in (model, made):
                own.zero_grad()
                torch.manual_seed(1)
                total(own(x)).backward()
                found.append([p.grad for p in own.parameters()])
            assert all(map(torch.equal, *found))
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def test_what_runs_once_is_called_whole(real):
    code = real.program(Plan()).code.partition("def forward")[2]
    assert code.count("torch.dropout(") == 2
    assert code.count("F.scaled_dot_product_attention(") == 1
    assert not any(f" {own.__name__}(" in code for own in SHOWN)
    assert_same_bits(real.step(), real.step(real.emitted(Plan())))


def test_what_a_region_parts_stays_apart(real):
    ops = real.problem.ops
    draw = next(i for i, op in enumerate(ops) if op.target == "torch.dropout.draw")
    for region, apart in (
        ((draw + 1, draw + 4), "drawn_mask("),
        ((draw - 1, draw + 1), "dropped("),
    ):
        plan = Plan.flat([region])
        assert apart in real.program(plan).code.partition("def forward")[2]
        assert_same_bits(real.step(), real.step(real.emitted(plan)))


def test_the_roofline_sees_dropout_whole():
    batch = (torch.randn(2, 16, 32),)
    coarse, fine = (
        lower_step(Net().train(), batch, {}, total, cost)[1] for cost in ("roofline", dear_draws)
    )
    assert not any(op.target.endswith(".draw") for op in coarse.ops)
    assert sum(op.target.endswith(".draw") for op in fine.ops) == 3


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("detached", ["", "v", "kv"])
def test_attention_that_torch_would_hold_more_for_is_emitted_in_parts(detached, bias, autocast):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(32, 96)
            self.bias = nn.Parameter(torch.zeros(1, 4, 64, 64))

        def forward(self, x: Tensor) -> Tensor:
            qkv = self.into(x).view(2, 64, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
            q, k, v = (t.detach() if n in detached else t for n, t in zip("qkv", qkv, strict=True))
            mask = self.bias * 2 if bias else None
            return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.2)

    model, x = Attention().train(), torch.randn(2, 64, 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = autockpt.optimize(model, (x,), loss=total, memory_budget="100%", cost=dear_draws)
    report = ours.autockpt.report

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ours = ours

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return self.ours(x)

    measured = measure(Around(), (x,), loss=total).peak_bytes
    assert abs(measured - report.peak_bytes) <= 64
