"""``optimize``: what it refuses, and that it does nothing by halves."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autockpt
from autockpt import pipeline
from autockpt.errors import (
    BudgetError,
    CaptureError,
    ForwardError,
    InfeasibleError,
    PlanError,
    ProfileError,
)
from autockpt.settings import MARGIN_BYTES, Settings, budget_for, margin_bytes
from solvers import Plan, least_peak
from tests.autockpt.test_runtime import Net, assert_alike, batch

NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


def optimize(model: Any, *args: Any, **settings: Any) -> Any:
    settings = {"memory_budget": "60%", "cost": "roofline", "solver": "interval_dp"} | settings
    return autockpt.optimize(model, args, **settings)


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"memory_budget": -1}, BudgetError, "-1"),
        ({"memory_budget": 0}, BudgetError, "0"),
        ({"memory_budget": "lots"}, BudgetError, "lots"),
        ({"memory_budget": "0%"}, BudgetError, "0%"),
        ({"memory_budget": "150%"}, BudgetError, "150%"),
        ({"memory_budget": 0.5}, TypeError, '"50%"'),
        ({"solver": "oracle"}, ValueError, "oracle"),
        ({"cost": "guess"}, ValueError, "guess"),
        ({"emit": "module"}, ValueError, "modules"),
        ({"emit": "bytecode"}, ValueError, "bytecode"),
        ({"reserve": -1}, BudgetError, "reserve"),
        ({"reserve": 0.5}, TypeError, "reserve"),
        ({"loss": 3}, TypeError, "loss"),
        ({"solve_seconds": 0}, ValueError, "solve_seconds"),
        ({"solve_seconds": "3"}, TypeError, "solve_seconds='3'"),
        ({"solver": ["auto"]}, ValueError, "auto"),
        ({"solver": None}, ValueError, "None"),
        ({"plan": "plan.json"}, TypeError, r"plan='plan\.json' is a str"),
    ],
)
def test_wrong_settings_are_refused_before_any_work(
    net: Net, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    calls: list[int] = []
    net.register_forward_pre_hook(lambda *_: calls.append(1))
    net.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(error, match=message):
        optimize(net, batch(), **settings)
    assert not calls


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (torch.ones(2), None, "args is a Tensor"),
        ("batch", None, "args is a str"),
        ({"x": 1}, None, "args is a dict"),
        (None, None, "args is a NoneType"),
        ((), [1], "kwargs is a list"),
    ],
)
def test_a_batch_that_is_no_batch(net: Net, args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        autockpt.optimize(net, args, kwargs, memory_budget="60%")
    with pytest.raises(TypeError, match=message):
        autockpt.minimum_budget(net, args, kwargs)


def test_a_budget_below_the_fixed_bytes(net: Net) -> None:
    with pytest.raises(BudgetError, match="parameters"):
        optimize(net, batch(), memory_budget=1000)


def test_a_budget_below_the_least_says_what_would_do(net: Net) -> None:
    with pytest.raises(InfeasibleError, match="Raise memory_budget") as caught:
        optimize(net, batch(), memory_budget="2%")
    least = caught.value.minimum_bytes
    assert least is not None
    assert str(least) in str(caught.value)
    optimized = optimize(net, batch(), memory_budget=least)
    assert_alike(net, optimized, batch())


def test_the_least_budget_can_be_asked_for(net: Net) -> None:
    least = autockpt.minimum_budget(net, (batch(),))
    optimized = optimize(net, batch(), memory_budget=least, solver=lambda p, _: least_peak(p))
    assert optimized.autockpt.report.peak_bytes <= least
    with pytest.raises(InfeasibleError):
        optimize(net, batch(), memory_budget=least - 8 * MARGIN_BYTES)
    with pytest.raises(BudgetError, match="reserve"):
        autockpt.minimum_budget(net, (batch(),), reserve=-1)


def test_the_whole_budget_is_the_plain_step(net: Net) -> None:
    optimized = optimize(net, batch(), memory_budget="100%")
    assert optimized.autockpt.plan.regions == ()
    assert optimized.autockpt.plan.status == "optimal"
    assert "checkpointed(" not in optimized.autockpt.code
    assert_alike(net, optimized, batch())


def test_a_reserve_is_taken_off(net: Net) -> None:
    plan = optimize(net, batch(), memory_budget="90%").autockpt.plan
    reserved = optimize(net, batch(), memory_budget="90%", reserve=2**18).autockpt.plan
    assert reserved.budget_bytes == plan.budget_bytes - 2**18


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("model", TypeError, "not a torch.nn.Module"),
        (torch.jit.script(nn.Linear(2, 2)), CaptureError, "scripted"),
        (torch.compile(nn.Linear(2, 2)), CaptureError, "compiled"),
        (nn.DataParallel(nn.Linear(2, 2)), CaptureError, "Optimize first"),
    ],
)
def test_what_is_no_plain_module(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        optimize(model, torch.randn(2, 2))


def test_nothing_to_train(net: Net) -> None:
    net.requires_grad_(False)
    optimized = optimize(net, batch())
    assert isinstance(optimized, Net)
    assert "nothing to plan" in str(optimized.autockpt.report)
    assert optimized.autockpt.plan is None
    net.eval()
    assert torch.equal(optimized.eval()(batch()), net(batch()))


def test_an_input_that_requires_grad_is_enough(net: Net) -> None:
    net.requires_grad_(False)
    x = batch().requires_grad_()
    optimized = optimize(net, x)
    assert optimized.autockpt.plan.regions
    assert_alike(net, optimized, x)


def test_an_output_that_does_not_require_grad(net: Net) -> None:
    class Detached(Net):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(x).detach()

    with pytest.raises(CaptureError, match="requires grad"):
        optimize(Detached(), batch())


def test_an_optimized_model_is_planned_anew(net: Net) -> None:
    first = optimize(net, batch())
    second = optimize(first, batch(), memory_budget="100%")
    assert type(second) is type(first)
    assert second.autockpt is not first.autockpt
    assert second.autockpt.plan.regions == ()
    assert first.autockpt.plan.regions
    assert_alike(first, second, batch())


def test_wrong_arguments_show_the_models_own_error(net: Net) -> None:
    with pytest.raises(ForwardError, match="unexpected keyword") as caught:
        autockpt.optimize(net, (batch(),), {"colour": "red"}, memory_budget="60%")
    assert isinstance(caught.value.__cause__, TypeError)


def test_tensors_on_another_device(net: Net) -> None:
    with pytest.raises(CaptureError, match=r"model is on cpu, .* meta"):
        optimize(net, torch.randn(512, 32, device="meta"))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out: out, r"shape \(512, 32\)"),
        (lambda out: 3.0, r"3\.0 \(float\)"),
        (lambda out: out.sum().detach(), "does not require grad"),
        (lambda out: out.nowhere, "The loss failed .* AttributeError"),
    ],
)
def test_a_loss_that_is_none(net: Net, loss: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        optimize(net, batch(), loss=loss)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError(NO_MEMORY)])
@pytest.mark.parametrize("stage", ["record", "check", "profile"])
def test_no_memory_while_planning(
    net: Net, stage: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    state = torch.get_rng_state()
    monkeypatch.setattr(pipeline, stage, fail)
    with pytest.raises(ProfileError, match=r"out of memory while the .*cost='roofline'") as caught:
        optimize(net, batch())
    assert caught.value.__cause__ is error
    assert torch.equal(torch.get_rng_state(), state)


def test_no_memory_for_one_op(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("autockpt.profiler.rehearse.watched_run", fail)
    with pytest.raises(ProfileError, match=r"functional\.linear' was measured.*cost='roofline'"):
        optimize(net, batch())


@pytest.mark.parametrize("failing", ["forward", "capture", "budget", "solver"])
def test_a_failure_leaves_the_model_as_it_was(net: Net, failing: str) -> None:
    before = copy.deepcopy(net.state_dict())
    attributes = {name: dict(vars(module)) for name, module in net.named_modules()}
    state = torch.get_rng_state()
    x = torch.randn(4, 5) if failing == "forward" else batch()
    state = torch.get_rng_state()
    settings: dict[str, Any] = {
        "budget": {"memory_budget": "2%"},
        "solver": {"solver": lambda *_: 1 / 0},
        "capture": {"loss": lambda out: torch.from_numpy(out.detach().numpy()).sum()},
    }.get(failing, {})
    with pytest.raises(Exception):  # noqa: B017 - any will do
        optimize(net, x, **settings)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert attributes == {name: dict(vars(module)) for name, module in net.named_modules()}


def test_a_solver_of_ones_own(net: Net) -> None:
    def solver(problem: Any, budget_bytes: int, **_: Any) -> Plan:
        free = [i for i, op in enumerate(problem.ops) if not op.pinned]
        edges = [i for i in range(len(free)) if problem.boundaries[i]]
        stop = next(i for i in reversed(edges) if not any(o.pinned for o in problem.ops[:i]))
        return Plan.flat([(0, stop // 2), (stop // 2, stop)])

    optimized = optimize(net, batch(), memory_budget="97%", solver=solver)
    assert optimized.autockpt.plan.regions
    assert_alike(net, optimized, batch())


@pytest.mark.parametrize(
    ("solver", "error"),
    [
        (lambda *_, **__: Plan(), PlanError),
        (lambda *_, **__: Plan.flat([(3, 1)]), PlanError),
        (lambda *_, **__: "a plan", PlanError),
        (lambda *_, **__: Plan.flat([(0, 2)], signature="another"), PlanError),
        (lambda *_, **__: 1 / 0, PlanError),
        (lambda: Plan(), PlanError),
    ],
)
def test_a_solver_that_is_wrong(net: Net, solver: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        optimize(net, batch(), solver=solver)


def test_a_plan_made_before_is_taken_as_it_is(net: Net) -> None:
    plan = Plan.from_json(optimize(net, batch()).autockpt.plan.to_json())
    for late in (False, True):
        batches = () if late else (batch(),)
        again = optimize(net, *batches, memory_budget="100%", plan=plan, solver=lambda: Plan())
        assert_alike(net, again, batch())
        assert again.autockpt.plan.regions == plan.regions
    # Another call of the model is another step.
    again = optimize(net, batch(), plan=plan)
    assert_alike(net, again, batch(), flip=True)


def test_a_plan_that_is_not_for_this_step(net: Net) -> None:
    plan = optimize(net, batch()).autockpt.plan
    with pytest.raises(PlanError, match="made for another model"):
        optimize(Net(depth=4), batch(), plan=plan)
    with pytest.raises(PlanError, match="The given plan needs"):
        optimize(net, batch(), memory_budget=plan.budget_bytes - 2**18, plan=plan)
    with pytest.raises(PlanError, match="The given plan needs"):
        optimize(net, batch(), plan=Plan())
    with pytest.raises(PlanError, match="disjoint"):
        optimize(net, batch(), plan=Plan.flat([(3, 1)]))


def test_meta_models_are_planned_without_memory() -> None:
    with torch.device("meta"):
        net = Net(depth=4, width=4096)
        x = torch.randn(2**14, 4096)
    optimized = optimize(net, x)
    report = optimized.autockpt.report
    assert optimized.autockpt.plan.regions
    assert optimized(x).shape == x.shape
    # Nothing takes time there: what is asked for by default cannot be had.
    assert report.cost == "roofline"
    assert report.recompute_share > 0
    assert "Planned on meta" in str(report)


@given(st.integers(1, 10**11), st.integers(0, 10**9), st.integers(0, 10**7))
def test_margins(activations: int, fixed: int, reserve: int) -> None:
    budget = budget_for(fixed + activations, fixed, reserve)

    def room(budget: int) -> int:
        return budget - reserve - margin_bytes(budget, fixed) - fixed

    assert room(budget) >= activations > room(budget - 2)


def test_auto_is_the_default(net: Net) -> None:
    optimized = autockpt.optimize(net, (batch(),), memory_budget="70%", cost="roofline")
    assert optimized.autockpt.plan.solver == "auto"
    assert optimized.autockpt.report.bound_cost is not None


def test_settings_are_checked_where_they_are_made() -> None:
    Settings(memory_budget="6GiB").check()


def test_a_reserve_that_leaves_less_than_what_is_fixed_is_said_to() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    with pytest.raises(autockpt.BudgetError, match=r"reserve=1000000000 .*leaves 0 B of .*fixed"):
        autockpt.optimize(
            model, (torch.ones(256, 64),), memory_budget="60%", reserve=10**9, cost="roofline"
        )


def test_a_share_that_is_too_small_is_answered_with_a_share() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    batch = (torch.ones(4096, 64),)
    with pytest.raises(autockpt.InfeasibleError, match=r'"\d+%"') as caught:
        autockpt.optimize(model, batch, memory_budget="5%", cost="roofline")
    (share,) = re.findall(r'"(\d+%)"', str(caught.value))
    assert autockpt.optimize(model, batch, memory_budget=share, cost="roofline").autockpt.plan


def test_the_least_budget_names_its_culprits() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])
    least = autockpt.minimum_budget(model, (torch.ones(4096, 64),))
    holding = least.holding
    assert holding.peak_bytes < least == int(least)
    rest = holding.fixed_bytes + holding.gradient_bytes + holding.workspace_bytes
    assert holding.peak_bytes == rest + sum(row.nbytes for row in holding.rows)
    assert holding.regions > 0
    assert holding.source.startswith("test_api.py:")
    assert holding.op in ("torch.nn.functional.linear", "torch.nn.functional.gelu")
    again = copy.deepcopy(least)
    assert (again, again.holding.peak_bytes) == (least, holding.peak_bytes)
    planned = autockpt.optimize(model, (torch.ones(4096, 64),), memory_budget=least)
    assert planned.autockpt.report.peak_bytes <= least
