"""What else loops do: scalers, penalties, hooks, signals, threads. Ours beside the plain model."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, update_bn

import autockpt
from tests.autockpt.test_guarded import Failing, Fragile
from tests.autockpt.test_loops import patched_by_planning
from tests.autockpt.test_runtime import Mlp, Net, batch
from tests.helpers import equal, leaves

Loop = Callable[[Any], Any]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


@loop
def scaled_half_precision(model: Any) -> list[float]:
    """GradScaler with an overflow in the second step: its optimizer step is left out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(batch()).float().pow(2).mean()
        if step == 1:
            loss = loss * 1e30
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert len(set(scales)) > 1
    return scales


@loop
def weights_in_half_precision(model: Any) -> None:
    model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    for _ in range(3):
        model(batch().bfloat16()).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    model(batch().bfloat16()).sum().backward()


@loop
def autocast_around_a_part(model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        x = model(batch())
        with torch.autocast("cpu", enabled=False):
            y = model(x.float())
    (x.float().sum() + y.sum()).backward()


@loop
def backward_inside_autocast(model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            model(batch()).float().pow(2).mean().backward()


@loop
def gradient_penalty(model: Any) -> None:
    """As WGAN-GP: the norm of the gradient at the input is part of the loss."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(2):
        x = batch(256 + step).requires_grad_()
        y = model(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = y.mean() + 10 * (gradient.norm(2, dim=1) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@loop
def hessian_vector_product(model: Any) -> tuple[Tensor, ...]:
    loss = model(batch()).pow(2).mean()
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    return torch.autograd.grad(sum(g.sum() for g in gradients), parameters, allow_unused=True)


@loop
def graph_retained(model: Any) -> tuple[Tensor, ...]:
    y = model(batch())
    first = torch.autograd.grad(y.sum(), model.norm.weight, retain_graph=True)
    y.mean().backward(retain_graph=True)
    y.pow(2).sum().backward()
    return first


@loop
def thawed_after_a_warm_up(model: Any) -> None:
    model.blocks.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2)
    model(batch()).sum().backward()
    optimizer.step()
    model.blocks.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.blocks.parameters())})
    for _ in range(2):
        optimizer.zero_grad()
        model(batch()).pow(2).sum().backward()
        optimizer.step()


@loop
def teacher_and_student(model: Any) -> None:
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    with torch.no_grad():
        wanted = teacher(batch())
    (model(batch()) - wanted).pow(2).mean().backward()
    (teacher(model(batch())) - wanted).pow(2).mean().backward()


@loop
def saved_elsewhere(model: Any) -> list[tuple[int, ...]]:
    """Saved tensors are packed by the caller's hooks: what is kept goes through them."""
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Any:
        packed.append(tuple(tensor.shape))
        return tensor.detach().cpu().clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(batch()).pow(2).sum()
    loss.backward()
    assert packed
    return []


@loop
def norms_in_one_call(model: Any) -> Tensor:
    for _ in range(2):
        model(batch()).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return norm


@loop
def no_grad_and_inference(model: Any) -> list[Tensor]:
    with torch.inference_mode():
        found = [model(batch(8)).clone()]
    with torch.no_grad():
        found.append(model(batch(9)))
        with torch.enable_grad():
            model(batch()).sum().backward()
    return found


@loop
def averaged_weights(model: Any) -> list[Tensor]:
    """Stochastic weight averaging: a deep copy, its statistics taken anew, then trained on."""
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch()).pow(2).mean().backward()
        optimizer.step()
        average.update_parameters(model)
    update_bn([batch()], average)
    average(batch()).sum().backward()
    return [*(p.grad for p in average.parameters()), *average.buffers()]


@loop
def pruned(model: Any) -> None:
    prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.3)
    model(batch()).sum().backward()
    prune.remove(model.blocks[0].up, "weight")
    model(batch()).sum().backward()


@loop
def spectral_norm(model: Any) -> None:
    """Looks at a transposed weight under no_grad, and writes buffers, in every forward."""
    nn.utils.parametrizations.spectral_norm(model.blocks[0].up)
    for _ in range(2):
        model(batch()).sum().backward()


@loop
def hooks_on_gradients(model: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    for _ in range(2):
        model(batch()).sum().backward()
    return seen


@loop
def second_order_optimizer(model: Any) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=3)

    def closure() -> Tensor:
        torch.manual_seed(11)
        optimizer.zero_grad()
        loss = model(batch()).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    model(batch()).sum().backward()


def prepared() -> tuple[Net, Any]:
    torch.manual_seed(0)
    plain = Net()
    optimized: Any = autockpt.optimize(
        copy.deepcopy(plain),
        (batch(),),
        memory_budget="70%",
        cost="roofline",
        solver="interval_dp",
    )
    assert optimized.autockpt.plan.regions
    return plain, optimized


def assert_alike(plain: nn.Module, optimized: nn.Module) -> None:
    for p, q in zip(plain.parameters(), optimized.parameters(), strict=True):
        assert equal(p, q)
        assert equal(p.grad, q.grad)
    assert all(map(equal, plain.buffers(), optimized.buffers()))


@pytest.mark.parametrize("name", LOOPS)
def test_loop(name: str) -> None:
    plain, optimized = prepared()
    torch.manual_seed(5)
    expected, state = LOOPS[name](plain), torch.get_rng_state()
    torch.manual_seed(5)
    found = LOOPS[name](optimized)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(equal, leaves(expected), leaves(found)))
    if expected is None or isinstance(expected, list):
        assert isinstance(expected, type(found))
    assert_alike(plain, optimized)


class Looking(Net):
    """Looks at rows of its input and at a transposed weight without grad."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            direction = torch.mv(self.blocks[0].up.weight.T, self.blocks[0].up.bias)
            scale = x[:4].mean() + self.blocks[1].down.weight[0].norm()
        return super().forward(x + direction * scale, *args, **kwargs)


def test_views_of_what_requires_grad_under_no_grad() -> None:
    plain = Looking()
    optimized: Any = autockpt.optimize(
        copy.deepcopy(plain), memory_budget="70%", cost="roofline", solver="interval_dp"
    )
    x = batch().requires_grad_()
    for model in (plain, optimized):
        torch.manual_seed(1)
        model(x).sum().backward()
    assert optimized.autockpt.plan.regions
    assert_alike(plain, optimized)


@pytest.mark.parametrize("when", ["forward", "backward", "recomputation", "planning"])
def test_an_interrupt_in_the_middle_of_a_step(when: str) -> None:
    """Ctrl-C: the step is lost, the model, its plan and torch's globals are not."""
    torch.manual_seed(0)
    plain = Fragile()
    optimized: Any = autockpt.optimize(
        copy.deepcopy(plain), memory_budget="60%", cost="roofline", solver="interval_dp"
    )
    if when != "planning":
        torch.manual_seed(1)
        optimized(batch())
        optimized.load_state_dict(copy.deepcopy(plain.state_dict()))
    patched, calls = patched_by_planning(), 0
    forward = Failing.forward

    def interrupting(ctx: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == {"forward": 3, "planning": 3, "recomputation": 9}.get(when):
            signal.raise_signal(signal.SIGINT)
        return forward(ctx, x)

    hook = None
    if when == "backward":
        weight = optimized.blocks[2].up.weight
        hook = weight.register_hook(lambda _: signal.raise_signal(signal.SIGINT))
    # Where tests run in the background the signal is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    # Of the custom Function's call, whichever way it is made.
    Failing.forward = staticmethod(interrupting)  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            optimized(batch()).sum().backward()
    finally:
        signal.signal(signal.SIGINT, before)
        Failing.forward = staticmethod(forward)  # type: ignore[method-assign]
        if hook is not None:
            hook.remove()
    assert patched_by_planning() == patched
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    optimized.load_state_dict(copy.deepcopy(plain.state_dict()))
    for model in (plain, optimized):
        model.zero_grad()
        torch.manual_seed(2)
        model(batch()).sum().backward()
    assert optimized.autockpt.plan.regions
    assert_alike(plain, optimized)


def test_hooks_on_submodules_for_what_they_see() -> None:
    """Activations are looked at by hooks that were there before, once a step."""
    torch.manual_seed(0)
    plain = Net()
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            module.norm_of_output = output.detach().norm()

        return hook

    for name, module in plain.named_modules():
        if isinstance(module, Mlp):
            module.register_forward_hook(watch(name))
    optimized: Any = autockpt.optimize(
        copy.deepcopy(plain), memory_budget="60%", cost="roofline", solver="interval_dp"
    )
    for model in (plain, optimized):
        torch.manual_seed(1)
        model(batch()).sum().backward()
        for name, module in model.named_modules():
            if isinstance(module, Mlp):
                seen.setdefault(name, []).append(module.norm_of_output)
    assert all(equal(*pair) for pair in seen.values())
    assert len(seen) == 6
    assert optimized.autockpt.plan.regions
    assert_alike(plain, optimized)


def test_threads_train_copies_at_the_same_time() -> None:
    plain, optimized = prepared()
    pairs = [(copy.deepcopy(plain), copy.deepcopy(optimized)) for _ in range(3)]
    for pair in pairs:
        for model in pair:
            model.eval()
    errors: list[BaseException] = []

    def work(model: nn.Module, rows: int) -> None:
        try:
            for more in range(4):
                model(batch(rows + more % 2)).pow(2).sum().backward()
        except BaseException as error:  # noqa: BLE001  told to the test
            errors.append(error)

    for which in (0, 1):
        threads = [
            threading.Thread(target=work, args=(pair[which], 300 + 10 * number))
            for number, pair in enumerate(pairs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    for pair in pairs:
        assert_alike(*pair)


def test_backward_in_another_thread_than_forward() -> None:
    plain, optimized = prepared()
    for model in (plain, optimized):
        torch.manual_seed(4)
        loss = model(batch()).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert_alike(plain, optimized)


def test_transforms_work_or_say_why_not() -> None:
    plain, optimized = prepared()
    plain.eval(), optimized.eval()
    parameters = {name: p.detach() for name, p in plain.named_parameters()}

    def loss(model: nn.Module, own: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, own, (x,)).pow(2).mean()

    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(autockpt.CaptureError, match="torch.func transform"):
            transform(lambda own: loss(optimized, own, batch(8)))(parameters)
    with pytest.raises(autockpt.CaptureError, match="torch.func transform"):
        torch.func.jvp(lambda x: optimized(x), (batch(8),), (batch(8),))
    # The model that was passed in is there for them.
    gradients = torch.func.grad(lambda own: loss(plain, own, batch(8)))(parameters)
    plain(batch(8)).pow(2).mean().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_out_of_memory_in_a_step_and_a_smaller_batch() -> None:
    """The usual retry: catch, halve the batch, go on."""
    plain, optimized = prepared()

    class Full(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("no room")

    for model in (plain, optimized):
        torch.manual_seed(6)
        with suppress(torch.OutOfMemoryError):
            Full.apply(model(batch())).sum().backward()
        model.zero_grad()
        model(batch(256)).sum().backward()
    assert_alike(plain, optimized)
