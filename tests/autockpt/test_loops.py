"""Training loops as people write them, with the plain model beside the optimized one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autockpt
from tests.autockpt.test_runtime import Net, batch
from tests.helpers import CallCounter, equal

Loop = Callable[[Any], Any]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


def backward(model: Any, x: Tensor | None = None) -> None:
    model(batch() if x is None else x).float().sum().backward()


@loop
def accumulation(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for number in range(3):
        for part in range(3):
            (model(batch(512 - part)).pow(2).mean() / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(number % 2))
    backward(model)


@loop
def autocast(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch()).float().pow(2).mean()
        loss.backward()
        optimizer.step()


@loop
def freezing(model: Any) -> None:
    backward(model)
    model.blocks[:3].requires_grad_(False)
    backward(model)
    model.requires_grad_(False)
    model.norm.weight.requires_grad_(True)
    model.zero_grad()
    backward(model)
    model.requires_grad_(True)
    backward(model)


@loop
def evaluation_between(model: Any) -> list[Tensor]:
    model.eval()
    backward(model)
    with torch.no_grad():
        found = [model(batch(9))]
    with torch.inference_mode():
        found.append(model(batch(10)).clone())
    model.train()
    backward(model)
    return found


@loop
def other_weights(model: Any) -> None:
    backward(model)
    torch.manual_seed(7)
    model.load_state_dict(Net().state_dict(), assign=True)
    backward(model)


@loop
def other_dtypes(model: Any) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        model.zero_grad()
        model.to(dtype)
        backward(model, batch().to(dtype))


@loop
def moving_average(model: Any) -> list[Tensor]:
    average = copy.deepcopy(model)
    backward(model)
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter + 1, 0.1)
    backward(average)
    return [parameter.grad for parameter in average.parameters()]


@loop
def hooks_on_the_root(model: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    model.register_forward_hook(lambda _, args, output: 3 * output)
    model.register_full_backward_hook(lambda _, gi, go: seen.append(go[0].clone()))
    model.register_full_backward_pre_hook(lambda _, go: (0.5 * go[0],))
    backward(model, batch().requires_grad_())
    return seen


@loop
def last_batch_is_smaller(model: Any) -> None:
    for _ in range(2):
        for rows in (64, 64, 17):
            backward(model, batch(rows))


@loop
def twice_in_a_step(model: Any) -> None:
    (model(batch()) + model(2 * batch())).sum().backward()


@loop
def backward_twice(model: Any) -> None:
    loss = model(batch()).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()


@loop
def gradient_of_a_gradient(model: Any) -> None:
    x = batch().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()


@loop
def gradient_of_one_parameter(model: Any) -> Any:
    loss = model(batch()).pow(2).sum()
    (gradient,) = torch.autograd.grad(loss, model.blocks[4].up.weight)
    return gradient


@loop
def forwards_before_backwards(model: Any) -> None:
    losses = [model(batch(512 - more)).sum() for more in range(3)]
    for loss in reversed(losses):
        loss.backward()


@loop
def errors_between(model: Any) -> None:
    with suppress(RuntimeError):
        model(torch.randn(3, 5))
    with suppress(RuntimeError):
        model(batch().double())
    handle = model.blocks[2].up.weight.register_hook(lambda gradient: 1 / 0)
    with suppress(ZeroDivisionError):
        backward(model)
    handle.remove()
    model.zero_grad()
    backward(model)


@loop
def offloading(model: Any) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = model(batch()).sum()
    loss.backward()


@loop
def anomalies_looked_for(model: Any) -> None:
    with torch.autograd.set_detect_anomaly(True):
        backward(model)


@loop
def hooks_on_the_output(model: Any) -> Any:
    y = model(batch())
    y.register_hook(lambda gradient: 2 * gradient)
    y.retain_grad()
    y.sum().backward()
    return y.grad


@loop
def functional_call(model: Any) -> list[Tensor]:
    own = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, own, (batch(),)).sum().backward()
    return [parameter.grad for parameter in own.values()]


@loop
def parametrized_afterwards(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.blocks[1].up)
    backward(model)


@loop
def another_layer(model: Any) -> None:
    torch.manual_seed(3)
    model.blocks[3].down = nn.Linear(128, 32)
    backward(model)


@loop
def strided_batch(model: Any) -> None:
    backward(model, batch(32, 512).t())


@loop
def checkpointed_by_its_caller(model: Any) -> None:
    model.norm.eval()
    for reentrant in (False, True):
        x = batch().requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_loop(name: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    optimized: Any = autockpt.optimize(
        copy.deepcopy(plain),
        (batch(),),
        memory_budget="80%",
        cost="roofline",
        solver="interval_dp",
    )
    assert optimized.autockpt.plan.regions
    torch.manual_seed(5)
    expected, state = LOOPS[name](plain), torch.get_rng_state()
    torch.manual_seed(5)
    found = LOOPS[name](optimized)
    assert torch.equal(torch.get_rng_state(), state)
    assert_alike(expected, found)
    for a, b in zip(plain.parameters(), optimized.parameters(), strict=True):
        assert equal(a, b)
        assert equal(a.grad, b.grad)
    assert all(map(equal, plain.buffers(), optimized.buffers()))


def assert_alike(expected: Any, found: Any) -> None:
    if isinstance(expected, Tensor):
        expected, found = [expected], [found]
    assert all(equal(a, b) for a, b in zip(expected or (), found or (), strict=True))


def test_two_optimized_models_in_turn() -> None:
    torch.manual_seed(0)
    pairs = []
    for depth in (6, 4):
        plain = Net(depth)
        ours = autockpt.optimize(
            copy.deepcopy(plain), memory_budget="80%", cost="roofline", solver="interval_dp"
        )
        pairs.append((plain, ours))
    for first, second in zip(*pairs, strict=True):
        torch.manual_seed(1)
        y = first(batch())
        loss = F.mse_loss(first(second(y).detach()), second(y))
        loss.backward()
    for plain, ours in pairs:
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
            assert equal(a.grad, b.grad)


def patched_by_planning() -> list[Any]:
    owners: list[tuple[Any, str]] = [(nn.Module, "__call__")]
    owners += [(torch.autograd.Function, "apply")]
    owners += [(F, "has_torch_function"), (torch.utils.hooks.BackwardHook, "setup_input_hook")]
    return [vars(owner)[name] for owner, name in owners]


def test_interrupted_while_planning() -> None:
    class Interrupted(Net):
        armed = False

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            y = super().forward(*args, **kwargs)
            if self.armed:
                raise KeyboardInterrupt
            return y

    before = patched_by_planning()
    model: Any = Interrupted()
    values = copy.deepcopy(model.state_dict())
    optimized = autockpt.optimize(model, memory_budget="80%", cost="roofline", solver="interval_dp")
    optimized.armed = True
    state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        optimized(batch())
    after = patched_by_planning()
    assert before == after
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(equal, values.values(), model.state_dict().values()))
    optimized.armed = False
    backward(optimized)
    assert optimized.autockpt.plan.regions


@pytest.mark.parametrize("around", [CallCounter, torch.autograd.graph.save_on_cpu])
def test_planning_is_not_seen_by_what_is_around_the_step(around: Any) -> None:
    settings: dict[str, Any] = {"memory_budget": "80%", "cost": "roofline"}
    late: Any = autockpt.optimize(Net(), solver="interval_dp", **settings)
    early: Any = autockpt.optimize(Net(), (batch(),), solver="interval_dp", **settings)
    seen = []
    for model in (late, early):
        with around() as counter:
            loss = model(batch()).sum()
        loss.backward()
        seen.append(getattr(counter, "calls", None))
    assert seen[0] == seen[1]
    # The loss is recorded where the model was called.
    bare = [replace(op, source="") for op in late.autockpt.problem.ops]
    assert bare == [replace(op, source="") for op in early.autockpt.problem.ops]
