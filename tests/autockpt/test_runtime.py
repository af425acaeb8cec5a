"""What the caller gets back behaves as the model that was passed in."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import autockpt
from autockpt.errors import CaptureError
from autockpt.runtime import handle
from autockpt.runtime.swap import is_optimized
from tests import zoo
from tests.helpers import assert_same_bits, buffers_restored, recomputed_calls, run_case, run_step


class Mlp(nn.Module):
    """A block that saves more than it returns."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A stack of blocks with dropout and running statistics."""

    def __init__(self, depth: int = 6, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp(width) for _ in range(depth)])
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.gain = 1.0

    def forward(self, x: Tensor, scale: float = 0.5, *, flip: bool = False) -> Tensor:
        for block in self.blocks:
            x = self.drop(block(x, scale=scale))
        return self.gain * (self.norm(-x if flip else x))


class Branching(Net):
    """Takes another way for a batch with large values."""

    def forward(self, x: Tensor, scale: float = 0.5, *, flip: bool = False) -> Tensor:
        x = self.drop(self.norm(x))
        if x.abs().max() > 50 * scale:
            x = x.sign() * x.abs().sqrt()
        return super().forward(x, scale, flip=flip)


class Reading(Net):
    """Reads a number out of every batch and computes with it."""

    def forward(self, x: Tensor, scale: float = 0.5, *, flip: bool = False) -> Tensor:
        return super().forward(x * x.mean().item(), scale, flip=flip)


def batch(rows: int = 512, width: int = 32) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))


def planned(
    model: nn.Module, x: Tensor | None = None, budget: Any = "60%", emit: Any = "auto"
) -> Any:
    x = batch() if x is None else x
    return autockpt.optimize(
        model, (x,), memory_budget=budget, cost="roofline", solver="interval_dp", emit=emit
    )


def assert_alike(plain: nn.Module, optimized: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Two training steps of both, each from the same parameters and buffers."""
    state = copy.deepcopy(plain.state_dict())
    for seed in (1, 2):
        plain.load_state_dict(state)
        expected = run_step(plain, args, kwargs, torch.sum, seed=seed)
        optimized.load_state_dict(state)
        found = run_step(optimized, args, kwargs, torch.sum, seed=seed)
        assert_same_bits(expected, found)


@pytest.fixture
def net() -> Net:
    return Net()


def test_same_class_and_parameters(net: Net) -> None:
    optimized = planned(net)
    assert isinstance(optimized, Net)
    cls = type(optimized)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(cls, name) == getattr(Net, name)
    assert cls is type(planned(Net()))
    assert inspect.signature(optimized.forward) == inspect.signature(net.forward)
    assert list(optimized.state_dict()) == list(net.state_dict())
    pairs = zip(optimized.named_parameters(), net.named_parameters(), strict=True)
    assert all(a == b and p is q for (a, p), (b, q) in pairs)
    assert all(a is not b for a, b in zip(optimized.modules(), net.modules(), strict=True))
    assert not is_optimized(net)
    assert not hasattr(net, "autockpt")


def test_it_trains_alike_and_recomputes(net: Net) -> None:
    optimized = planned(net)
    assert_alike(net, optimized, batch())
    case = zoo.Case(net, (batch(),), {}, torch.sum)
    assert recomputed_calls(case, optimized)["aten.addmm.default"] > 0
    assert "checkpointed(" in optimized.autockpt.code
    assert optimized.autockpt.plan.regions


def test_plans_at_the_first_training_forward(net: Net) -> None:
    optimized = autockpt.optimize(net, memory_budget="60%", cost="roofline", solver="interval_dp")
    assert optimized.autockpt.plan is None
    assert "first training forward" in str(optimized.autockpt.report)
    with torch.no_grad():
        optimized(batch())
    assert optimized.autockpt.plan is None
    assert_alike(net, optimized, batch())
    assert optimized.autockpt.plan.regions


def test_without_grad_the_original_forward_runs(net: Net) -> None:
    optimized = planned(net)
    net.eval()
    optimized.eval()
    with torch.no_grad():
        assert torch.equal(optimized(batch()), net(batch()))
    with torch.inference_mode():
        assert torch.equal(optimized(batch(7)), net(batch(7)))
    assert len(optimized.autockpt._entries) == 1


def test_regions_hold_in_eval_mode(net: Net) -> None:
    optimized = planned(net)
    net.eval()
    optimized.eval()
    assert_alike(net, optimized, batch())
    case = zoo.Case(net, (batch(),), {}, torch.sum)
    assert recomputed_calls(case, optimized)["aten.addmm.default"] > 0


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_train_on_their_own(net: Net, duplicate: Any) -> None:
    optimized = planned(net)
    twin = duplicate(optimized)
    assert type(twin) is type(optimized)
    assert twin.autockpt is not optimized.autockpt
    assert twin.autockpt.plan == optimized.autockpt.plan
    assert_alike(copy.deepcopy(net), twin, batch())
    assert_alike(net, optimized, batch())


def test_a_copy_carries_its_plan_over(net: Net) -> None:
    optimized = planned(net)
    twin = copy.deepcopy(optimized)
    twin.autockpt.settings.check()
    run_step(twin, (batch(),), loss=torch.sum)
    assert twin.autockpt.plan.regions == optimized.autockpt.plan.regions
    assert twin.autockpt.code


def test_saved_whole_and_loaded(net: Net) -> None:
    optimized = planned(net)
    file = io.BytesIO()
    torch.save(optimized, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, Net)
    assert_alike(copy.deepcopy(net), loaded, batch())


def test_a_loss_that_cannot_be_pickled_is_asked_for_again(net: Net) -> None:
    optimized = autockpt.optimize(
        net,
        (batch(),),
        memory_budget="60%",
        cost="roofline",
        solver="interval_dp",
        loss=lambda out: out.sum(),
    )
    copy.deepcopy(optimized)(batch()).sum().backward()
    loaded = pickle.loads(pickle.dumps(optimized))
    with torch.no_grad():
        loaded(batch())
    with pytest.raises(CaptureError, match="loss=.*could not be pickled"):
        loaded(batch())


def test_parameters_are_looked_up_at_every_call(net: Net) -> None:
    optimized = planned(net)
    optimized.load_state_dict(Net().state_dict(), assign=True)
    optimized.blocks[2].up.weight = optimized.blocks[1].up.weight
    twin = copy.deepcopy(net)
    twin.load_state_dict(optimized.state_dict())
    twin.blocks[2].up.weight = twin.blocks[1].up.weight
    expected = run_step(twin, (batch(),), loss=torch.sum)
    found = run_step(optimized, (batch(),), loss=torch.sum)
    assert_same_bits(expected, found)


def test_changes_of_the_module_are_noticed(net: Net) -> None:
    optimized = planned(net)
    for change in (
        lambda m: setattr(m, "gain", 0.7),
        lambda m: m.norm.eval(),
        lambda m: setattr(m.drop, "p", 0.4),
        lambda m: m.blocks[0].requires_grad_(False),
        lambda m: m.blocks.append(m.blocks[0]),
    ):
        change(net)
        change(optimized)
        x = batch().to(net.norm.weight.dtype)
        net.zero_grad(set_to_none=True)
        assert_alike(net, optimized, x)


def test_as_a_part_of_a_larger_model(net: Net) -> None:
    twin = copy.deepcopy(net)
    head = nn.Linear(32, 2)
    plain = nn.Sequential(nn.Tanh(), twin, head)
    ours = nn.Sequential(nn.Tanh(), planned(net), copy.deepcopy(head))
    assert_same_bits(
        run_step(plain, (batch(),), loss=torch.sum), run_step(ours, (batch(),), loss=torch.sum)
    )


def test_direct_forward_and_hooks_on_the_root(net: Net) -> None:
    optimized = planned(net)
    seen: list[str] = []
    optimized.register_forward_hook(lambda *_: seen.append("after"))
    optimized.register_full_backward_hook(lambda *_: seen.append("backward"))
    optimized(batch()).sum().backward()
    assert seen == ["after", "backward"]
    optimized.forward(batch()).sum().backward()
    assert seen == ["after", "backward"]


def test_new_shapes_carry_the_plan_over(net: Net) -> None:
    optimized = planned(net)
    regions = optimized.autockpt.plan.regions
    assert_alike(net, optimized, batch(500))
    assert optimized.autockpt.plan.regions == regions
    assert_alike(net, optimized, batch(512))
    assert len(optimized.autockpt._entries) == 2


def test_a_larger_shape_is_solved_again_inside_the_same_bytes(net: Net) -> None:
    budget = planned(net, budget="70%").autockpt.report.budget_bytes
    optimized = planned(net, budget=budget)
    first = optimized.autockpt.plan
    assert_alike(net, optimized, batch(600))
    again = optimized.autockpt.plan
    assert again.regions != first.regions
    assert again.peak_bytes <= again.budget_bytes
    with pytest.raises(autockpt.InfeasibleError, match=r"Raise memory_budget to .* bytes"):
        optimized(batch(5000))


def test_a_share_is_one_of_the_step_at_hand(net: Net) -> None:
    optimized = planned(net, budget="70%")
    first = optimized.autockpt.report
    assert_alike(net, optimized, batch(5000))
    large = optimized.autockpt.report
    assert large.budget_bytes > 5 * first.budget_bytes
    assert_alike(net, optimized, batch(100))
    assert optimized.autockpt.report.budget_bytes == first.budget_bytes
    assert optimized.autockpt.plan.regions == ()


def test_the_cache_is_bounded_and_says_once_when_it_is_full(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "MAX_ENTRIES", 3)
    optimized = planned(net)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for rows in range(64, 70):
            optimized(batch(rows)).sum().backward()
    (said,) = [str(warning.message) for warning in seen if "different ways" in str(warning.message)]
    assert "more than 3 different ways" in said
    assert "Pad or bucket" in said
    assert len(optimized.autockpt._entries) == 3


def test_other_arguments_are_another_step(net: Net) -> None:
    optimized = planned(net)
    assert_alike(net, optimized, batch(), 0.25)
    assert_alike(net, optimized, batch(), flip=True)
    assert_alike(net, optimized, batch(), scale=0.25)
    assert len(optimized.autockpt._entries) == 3


def test_another_branch_is_another_step() -> None:
    net = Branching()
    optimized = planned(net, budget="75%")
    small, large = batch(), batch().clone()
    large[0] = 1e5
    for x in (small, large, small, large):
        assert_alike(net, optimized, x)
    assert len(optimized.autockpt._entries) == 2


def test_a_value_that_always_differs_is_refused() -> None:
    net = Reading()
    optimized = planned(net, emit="graph")
    state = torch.get_rng_state()
    mean = net.norm.running_mean.clone()
    with pytest.raises(CaptureError, match="differs in every call"):
        for shift in range(5):
            state = torch.get_rng_state()
            mean = net.norm.running_mean.clone()
            optimized(batch() + shift)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(net.norm.running_mean, mean)


def test_the_models_own_errors_stay_its_own(net: Net) -> None:
    optimized = planned(net)
    with pytest.raises(TypeError, match="unexpected keyword"):
        optimized(batch(), colour="red")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        optimized(torch.randn(4, 5))
    assert_alike(net, optimized, batch())


def test_a_frozen_model_runs_plain(net: Net) -> None:
    optimized = planned(net)
    net.eval().requires_grad_(False)
    optimized.eval()
    assert torch.equal(optimized(batch()), net(batch()))
    assert_alike(net, optimized, batch().requires_grad_())


def test_threads_share_one_plan(net: Net) -> None:
    net.eval()
    optimized = autockpt.optimize(net, memory_budget="60%", cost="roofline", solver="interval_dp")
    losses: list[float] = []

    def work() -> None:
        losses.append(float(optimized(batch()).sum().detach()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(losses)) == 1
    assert len(losses) == 4
    assert len(optimized.autockpt._entries) == 1


def test_threads_plan_two_models() -> None:
    nets = [Net().eval() for _ in range(2)]
    optimized = [
        autockpt.optimize(net, memory_budget="60%", cost="roofline", solver="interval_dp")
        for net in nets
    ]

    def work(model: nn.Module, rows: int) -> None:
        for more in range(3):
            model(batch(rows + more)).sum().backward()

    threads = [
        threading.Thread(target=work, args=(model, 200 * i))
        for i, model in enumerate(optimized, start=1)
    ]
    twins = [copy.deepcopy(net) for net in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (net, twin) in enumerate(zip(nets, twins, strict=True), start=1):
        work(twin, 200 * i)
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_planning_does_not_disturb_a_graph_that_waits_for_its_backward(net: Net) -> None:
    def step(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        losses = [model(batch(rows)).sum() for rows in (300, 310, 320)]
        losses.append(model(model(batch(64))).sum())
        for loss in reversed(losses):
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    twin = copy.deepcopy(net)
    assert all(map(torch.equal, step(planned(net)), step(twin)))
    assert all(map(torch.equal, net.buffers(), twin.buffers()))


def test_transforms_of_torch_func_are_refused(net: Net) -> None:
    optimized = planned(net.eval())
    with pytest.raises(CaptureError, match="torch.func transform"):
        torch.func.grad(lambda x: optimized(x).sum())(batch())
    with torch.no_grad():
        rows = torch.func.vmap(lambda x: optimized(x[None])[0])(batch(4))
    torch.testing.assert_close(rows, net(batch(4)))


def test_a_transformer_in_every_day_use(tmp_path: Any) -> None:
    case = zoo.gpt2(layers=2)
    model = autockpt.optimize(
        case.model,
        case.args,
        case.kwargs,
        memory_budget="50%",
        cost="roofline",
        solver="interval_dp",
    )
    assert_same_bits(run_case(case), run_case(case, model))
    assert model.config is case.model.config
    prompt = case.kwargs["input_ids"][:1, :8]
    model.eval()
    generated = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    case.model.eval()
    expected = case.model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, expected)
    model.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["GPT2LMHeadModel"]
    assert torch.equal(loaded.transformer.wte.weight, model.transformer.wte.weight)


def test_padding_after_no_padding() -> None:
    case = zoo.gpt2(layers=2)
    model = autockpt.optimize(
        case.model,
        case.args,
        case.kwargs,
        memory_budget="60%",
        cost="roofline",
        solver="interval_dp",
    )
    mask = torch.ones_like(case.kwargs["input_ids"])
    padded = mask.clone()
    padded[1, 40:] = 0
    for attention_mask in (mask, padded, mask, padded):
        other = case._replace(kwargs={**case.kwargs, "attention_mask": attention_mask})
        assert_same_bits(run_case(other), run_case(other, model))
    assert len(model.autockpt._entries) == 3


def test_the_emitted_forward_compiles() -> None:
    layers = [(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh()) for _ in range(4)]
    net = nn.Sequential(*[layer for block in layers for layer in block])
    optimized = planned(net, budget="85%")
    assert "statistic(" in optimized.autockpt.code
    twin = copy.deepcopy(net)
    expected = run_step(twin, (batch(),), loss=torch.sum)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    with buffers_restored(net):
        torch.compile(optimized, backend=backend)(batch())
    assert len(graphs) == 1
    assert "tag_activation_checkpoint" in graphs[0]
    torch._dynamo.reset()
    found = run_step(torch.compile(optimized, backend="aot_eager"), (batch(),), loss=torch.sum)
    torch.testing.assert_close(found.loss, expected.loss)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    for a, b in zip(net.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_model_is_gone_with_its_last_reference(net: Net) -> None:
    optimized = planned(net)
    optimized(batch()).sum().backward()
    gone = weakref.ref(optimized)
    gc.collect()
    gc.disable()
    try:
        del optimized
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["assign", "layer", "buffer"])
def test_what_was_replaced_is_let_go(how: str) -> None:
    net = Net()
    optimized = planned(net)
    for rows in (100, 101):
        optimized(batch(rows)).sum().backward()
    optimized.zero_grad()
    gone: list[weakref.ref[Any]]
    if how == "assign":
        gone = [weakref.ref(t) for t in (*optimized.parameters(), *optimized.buffers())]
        optimized.load_state_dict(Net().state_dict(), assign=True)
    elif how == "layer":
        gone = [weakref.ref(net.blocks[1].up.weight), weakref.ref(optimized.blocks[1])]
        optimized.blocks[1] = Mlp()
    else:
        gone = [weakref.ref(net.norm.running_mean)]
        optimized.norm.running_mean = torch.zeros(32)
    del net
    optimized(batch()).sum().backward()
    gc.collect()
    assert not any(reference() is not None for reference in gone)


def test_a_missed_guard_frees_the_aborted_forward() -> None:
    net = Branching()
    optimized = planned(net, budget="75%")
    large = batch().clone()
    large[0] = 1e5
    optimized(batch()).sum().backward()
    optimized(large).sum().backward()
    gc.collect()
    gc.disable()
    try:
        before = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
        for x in (batch(), large, batch(), large):
            optimized(x).sum().backward()
        assert sum(issubclass(type(o), Tensor) for o in gc.get_objects()) <= before
    finally:
        gc.enable()


def test_a_larger_model_with_an_optimized_part_is_planned_as_a_whole(net: Net) -> None:
    part = planned(net)
    whole = nn.Sequential(nn.Linear(32, 32), part, nn.Tanh())
    optimized = planned(whole)
    assert_alike(whole, optimized, batch())
    assert any(op.module.startswith("1.blocks") for op in optimized.autockpt.problem.ops)
    assert type(optimized[1]) is type(part)


def doubled(forward: Any) -> Any:
    @functools.wraps(forward)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return 2 * forward(*args, **kwargs)

    return inner


def test_a_forward_put_around_ours_afterwards() -> None:
    # As accelerate does. The context is one object, which must not be entered inside itself.
    plain = Net()
    optimized: Any = autockpt.optimize(
        copy.deepcopy(plain), memory_budget="60%", cost="roofline", solver="interval_dp"
    )
    for model in (plain, optimized):
        model.forward = torch.autocast("cpu", torch.bfloat16)(doubled(model.forward))
    for seed in (1, 2):
        pair = [run_step(m, (batch(),), loss=torch.sum, seed=seed) for m in (plain, optimized)]
        assert_same_bits(*pair)
    assert not torch.is_autocast_enabled("cpu")
    assert optimized.autockpt.plan.regions


def test_a_forward_put_around_the_models_before_is_refused(net: Net) -> None:
    net.forward = doubled(net.forward)
    with pytest.raises(CaptureError, match="replaced on the object"):
        planned(net)


def test_forwards_put_around_those_of_layers(net: Net) -> None:
    for block in net.blocks:
        block.forward = doubled(block.forward)
    optimized = planned(net)
    inner = optimized.blocks[1].forward.__closure__[0].cell_contents
    assert inner.__self__ is optimized.blocks[1]
    for mode in (True, False):
        steps = []
        for model in (net, optimized):
            model.train(mode)
            with buffers_restored(model):
                steps.append(run_step(model, (batch(),), loss=torch.sum))
        assert_same_bits(*steps)
