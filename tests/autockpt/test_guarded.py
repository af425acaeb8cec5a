"""A recomputation that is not the forward's is an error that says where, never a gradient."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autockpt
from autockpt.errors import RecomputationError
from tests.autockpt.test_runtime import Mlp, Net, batch
from tests.helpers import equal


def planned(model: nn.Module, x: Tensor | None = None) -> Any:
    x = batch() if x is None else x
    optimized: Any = autockpt.optimize(
        model, (x,), memory_budget="60%", cost="roofline", solver="interval_dp"
    )
    assert optimized.autockpt.plan.regions
    return optimized


Change = Callable[[Any], object]


@torch.no_grad()
def scaled_weight(model: Any) -> None:
    model.blocks[1].up.weight.mul_(2)


@torch.no_grad()
def shifted_bias(model: Any) -> None:
    # Plain autograd does not need the bias and lets this pass; a recomputation does.
    for block in model.blocks:
        block.up.bias.add_(1)


def other_data(model: Any) -> None:
    # Behind the back of versions: plain autograd has the old bytes, a recomputation would not.
    for block in model.blocks:
        block.up.weight.data = block.up.weight.data.clone()


def loaded(model: Any) -> None:
    model.load_state_dict(Net().state_dict())


def no_layers(model: Any) -> None:
    model.blocks = nn.ModuleList()


def stepped(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), 1e-2).step()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (scaled_weight, "modified by an inplace operation"),
        (shifted_bias, "modified by an inplace operation"),
        (loaded, "modified by an inplace operation"),
        (stepped, "modified by an inplace operation"),
        (other_data, "was given other .data"),
        (no_layers, "was taken out of the model"),
    ],
)
def test_weights_that_change_before_backward(change: Change, said: str) -> None:
    plain = Net()
    optimized = planned(copy.deepcopy(plain))
    keep = copy.deepcopy(plain.state_dict())
    loss = optimized(batch()).sum()
    change(optimized)
    with pytest.raises(RuntimeError, match=said) as caught:
        loss.backward()
    if change in (loaded, stepped):
        # The norm, which is in no region, is first to notice, in autograd's own words.
        assert not isinstance(caught.value, RecomputationError)
    else:
        text = str(caught.value)
        assert isinstance(caught.value, RecomputationError)
        assert re.match(r"blocks\.\d\.(up|down)\.(weight|bias) ", text)
        assert re.search(r"region \w+, (in|from) .*test_runtime.py:\d+\)", text)
    if change is no_layers:
        return
    # The model is usable afterwards.
    for model in (plain, optimized):
        model.load_state_dict(keep)
        model.zero_grad()
        torch.manual_seed(3)
        model(batch()).sum().backward()
    for p, q in zip(plain.parameters(), optimized.parameters(), strict=True):
        assert equal(p.grad, q.grad)


def assigned(model: Any) -> None:
    model.load_state_dict(Net().state_dict(), assign=True)


def another_layer(model: Any) -> None:
    model.blocks[1] = Mlp()
    model.blocks[2].up = nn.Linear(32, 128, bias=True)


def averaged(model: Any) -> None:
    model.norm.running_mean = torch.ones(32)


@pytest.mark.parametrize("change", [assigned, another_layer, averaged])
def test_weights_that_are_replaced_before_backward(change: Change) -> None:
    plain = Net()
    optimized = planned(copy.deepcopy(plain))
    gradients = []
    for model in (plain, optimized):
        before = list(model.parameters())
        torch.manual_seed(4)
        loss = model(batch()).sum()
        change(model)
        after = [*model.parameters(), *model.buffers()]
        loss.backward()
        gradients.append([parameter.grad for parameter in before])
        assert all(
            a is b for a, b in zip(after, [*model.parameters(), *model.buffers()], strict=True)
        )
    assert all(map(equal, *gradients))


def test_functional_call_with_other_weights() -> None:
    plain = Net()
    optimized = planned(copy.deepcopy(plain))
    gradients = []
    for model in (plain, optimized):
        torch.manual_seed(4)
        own = {
            name: torch.randn_like(p, requires_grad=True) for name, p in plain.named_parameters()
        }
        torch.func.functional_call(model, own, (batch(),)).sum().backward()
        gradients.append([parameter.grad for parameter in own.values()])
    assert all(map(equal, *gradients))


def test_a_batch_that_is_filled_again_before_backward() -> None:
    optimized = planned(Net())
    x = batch().requires_grad_().clone()
    loss = optimized(x).sum()
    with torch.no_grad():
        x.copy_(batch() + 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_weight_that_no_region_needs_again_may_change() -> None:
    class Tail(Net):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(32))

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(x, *args, **kwargs) + self.shift

    plain = Tail()
    optimized = planned(copy.deepcopy(plain))
    for model in (plain, optimized):
        torch.manual_seed(0)
        loss = model(batch()).sum()
        with torch.no_grad():
            model.shift += 1
        loss.backward()
    for p, q in zip(plain.parameters(), optimized.parameters(), strict=True):
        assert equal(p.grad, q.grad)


def test_an_optimizer_in_backward_steps_each_weight_when_its_gradient_is_there() -> None:
    plain = Net()
    optimized = planned(copy.deepcopy(plain))
    for model in (plain, optimized):
        optimizers = {p: torch.optim.AdamW([p], 1e-2) for p in model.parameters()}

        def update(parameter: Tensor, optimizers: Any = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for seed in range(3):
            torch.manual_seed(seed)
            model(batch()).pow(2).mean().backward()
    for p, q in zip(plain.parameters(), optimized.parameters(), strict=True):
        assert equal(p, q)


SAVED = {"count": 1, "rows": 0, "dtype": torch.float32}


class Fickle(torch.autograd.Function):
    """Saves what a global says: another thing on recomputation than in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        extra = torch.zeros(4 + SAVED["rows"], dtype=SAVED["dtype"])
        ctx.save_for_backward(x, *[extra] * SAVED["count"])
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, *_ = ctx.saved_tensors
        return gradient * (1 - x.tanh() ** 2)


class Unsteady(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(Fickle.apply(layer(x)).exp().tanh())
        return x


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"count": 0}, r"saved \d tensors in forward, and \d in backward"),
        ({"rows": 1}, r"\(4,\) of torch.float32 on cpu in forward, \(5,\) of"),
        ({"dtype": torch.float64}, "float64"),
    ],
)
def test_a_recomputation_that_differs_names_region_module_and_causes(
    change: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimized = planned(Unsteady())
    loss = optimized(batch()).sum()
    with monkeypatch.context() as patched:
        for name, value in change.items():
            patched.setitem(SAVED, name, value)
        with pytest.raises(RecomputationError, match=said) as caught:
            loss.backward()
    text = str(caught.value)
    assert re.match(r"Region \w+, from .* to 'layers\.\d' \(test_guarded.py:\d+\)", text)
    assert "Usual causes: a custom autograd.Function" in text
    assert "debug=True" not in text
    optimized(batch()).sum().backward()


class Failing(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if Failing.armed:
            raise ArithmeticError("no more")
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


class Fragile(Net):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for block in self.blocks:
            x = Failing.apply(block(x).sigmoid()).exp()
        return super().forward(x, *args, **kwargs)


@pytest.mark.parametrize("retry", ["backward", "step"])
def test_an_error_inside_a_recomputation(retry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Fragile()
    optimized = planned(copy.deepcopy(plain))
    torch.manual_seed(2)
    plain(batch()).sum().backward()
    torch.manual_seed(2)
    loss = optimized(batch()).sum()
    state = torch.get_rng_state()
    means = [buffer.clone() for buffer in optimized.buffers()]
    with monkeypatch.context() as patched:
        patched.setattr(Failing, "armed", True)
        with pytest.raises(ArithmeticError, match="no more") as caught:
            loss.backward(retain_graph=retry == "backward")
    assert "which runs again" in caught.value.__notes__[0]
    assert "'blocks." in caught.value.__notes__[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(equal, optimized.buffers(), means))
    optimized.zero_grad()
    if retry == "step":
        optimized.load_state_dict(plain.state_dict())
        torch.manual_seed(2)
        loss = optimized(batch()).sum()
    loss.backward()
    for p, q in zip(plain.parameters(), optimized.parameters(), strict=True):
        assert equal(p.grad, q.grad)


def test_torchs_own_search_for_differences_may_be_on() -> None:
    plain = Unsteady()
    optimized = planned(copy.deepcopy(plain))
    with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):
        optimized(batch()).sum().backward()
    plain(batch()).sum().backward()
    for p, q in zip(plain.parameters(), optimized.parameters(), strict=True):
        assert equal(p.grad, q.grad)


def test_watching_keeps_nothing_alive() -> None:
    optimized = planned(Net())
    loss = optimized(batch()).sum()
    gone = [weakref.ref(p) for p in optimized.parameters()]
    loss.backward()
    gc.collect()
    gc.disable()
    try:
        del optimized, loss
        assert not any(reference() is not None for reference in gone)
    finally:
        gc.enable()
