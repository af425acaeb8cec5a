"""What module regions refuse, leave alone, undo and carry over."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import autockpt
from autockpt import CaptureError, InfeasibleError, PlanError, RecomputationError
from autockpt.modules.parts import is_part
from autockpt.runtime.swap import release
from solvers import Plan
from solvers.judge.wellformed import check_plan
from tests.autockpt.test_modules import Block, Stack, whole_blocks
from tests.helpers import count_calls


def _x(length: int = 128) -> Tensor:
    return torch.randn(8, length, 32, generator=torch.Generator().manual_seed(1))


def _optimized(model: nn.Module, *args: Any, budget: str = "50%", **options: Any) -> nn.Module:
    return autockpt.optimize(
        model, args or (_x(),), memory_budget=budget, emit="modules", cost="roofline", **options
    )


def test_modules_really_run_again() -> None:
    model = _optimized(Stack(dropout=0.0), solver=whole_blocks)
    calls = count_calls(lambda: model(_x()).square().mean().backward())
    assert calls["aten.gelu.default"] == 8


def test_the_original_is_untouched_and_the_result_is_of_its_classes() -> None:
    model = Stack()
    classes = [type(module) for module in model.modules()]
    ours = _optimized(model)
    assert [type(module) for module in model.modules()] == classes
    for module, cls in zip(ours.modules(), classes, strict=True):
        assert isinstance(module, cls)
        assert type(module).__qualname__ == cls.__qualname__
        assert inspect.signature(module.forward) == inspect.signature(cls.forward.__get__(module))
    assert list(ours.state_dict()) == list(model.state_dict())
    assert str(ours) == str(model)


def test_undo_restores_every_class() -> None:
    model = Stack()
    ours = _optimized(model)
    assert any(is_part(module) for module in ours.modules())
    release(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in model.modules()]
    again = autockpt.optimize(_optimized(model), (_x(),), memory_budget="50%", emit="graph")
    assert not any(is_part(module) for module in again.modules())


def test_copies_and_pickles_plan_anew(tmp_path: Any) -> None:
    torch.manual_seed(0)
    plain = Stack()
    ours = _optimized(plain)
    path = tmp_path / "model.pt"
    torch.save(ours, path)
    others = [
        copy.deepcopy(ours),
        pickle.loads(pickle.dumps(ours)),
        torch.load(path, weights_only=False),
    ]
    expected = _gradients(plain)
    for other in others:
        found = _gradients(other)
        assert other.autockpt.over_modules
        assert other.autockpt.report.recompute_cost > 0
        assert all(map(torch.equal, expected, found))
    block = copy.deepcopy(ours.blocks[0])
    assert torch.equal(block.eval()(_x()), plain.blocks[0].eval()(_x()))


def _gradients(model: nn.Module) -> list[Tensor]:
    model.train().zero_grad()
    torch.manual_seed(5)
    model(_x()).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_hooks_of_inner_modules_run_once() -> None:
    model = Stack()
    seen: list[str] = []
    model.blocks[0].act.register_forward_hook(lambda *_: seen.append("act"))
    model.blocks[1].register_forward_hook(lambda *_: seen.append("block"))
    ours = _optimized(model, budget="70%")
    names = {span.name for span in ours.autockpt.problem.spans}
    assert "blocks.0" not in names
    assert {"blocks.0.act", "blocks.1"} <= names
    seen.clear()
    ours(_x()).sum().backward()
    assert ours.autockpt.report.recompute_cost > 0
    assert seen == ["act", "block"]


class _Forgetful(Block):
    """Reads a value that no one else can see."""

    values = iter(range(10**6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.values)


def test_a_module_that_differs_each_time_is_no_region() -> None:
    model = Stack(dropout=0.0)
    model.blocks[2] = _Forgetful()
    ours = _optimized(model, budget="70%", solver="auto")
    assert "blocks.2\n" not in ours.autockpt.code
    ours(_x()).sum().backward()


_SWITCH = [False]


class _Treacherous(Block):
    """Does something else once a switch outside is thrown."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if _SWITCH[0] else y.exp()


def test_a_recomputation_that_differs_names_the_module() -> None:
    model = Stack(dropout=0.0)
    for index in range(4):
        model.blocks[index] = _Treacherous()
    ours = _optimized(model, budget="70%", solver=whole_blocks)
    loss = ours(_x()).sum()
    _SWITCH[0] = True
    try:
        with pytest.raises(RecomputationError, match=r"Module blocks\.3 (.|\n)*Usual causes"):
            loss.backward()
    finally:
        _SWITCH[0] = False


def test_weights_that_change_before_backward_are_an_error() -> None:
    ours = _optimized(Stack(), solver=whole_blocks)
    loss = ours(_x()).sum()
    with torch.no_grad():
        ours.blocks[1].up.weight.add_(1)
    with pytest.raises((RecomputationError, RuntimeError), match="modified by an inplace"):
        loss.backward()


def test_checkpoints_of_the_model_itself_are_refused() -> None:
    class Own(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    with pytest.raises(CaptureError, match="calls checkpoint itself"):
        _optimized(Own())


def test_a_plan_is_carried_over_by_the_names_of_modules() -> None:
    model = Stack()
    first = _optimized(model)
    text = first.autockpt.plan.to_json()
    second = _optimized(model, plan=Plan.from_json(text))
    assert second.autockpt.code == first.autockpt.code
    # Another shape: the same modules, as long as they fit.
    second(_x(64)).sum().backward()
    assert second.autockpt.report.plain_peak_bytes < first.autockpt.report.plain_peak_bytes
    assert second.autockpt.report.peak_bytes <= second.autockpt.report.budget_bytes


def test_solvers_of_runs_are_refused() -> None:
    with pytest.raises(PlanError, match="calls of modules"):
        _optimized(Stack(), solver="rotor")


def test_a_region_that_is_no_module_call_is_refused() -> None:
    problem = _optimized(Stack()).autockpt.problem
    with pytest.raises(PlanError, match=r"no call of a module"):
        check_plan(Plan.flat([(0, 2)]), problem)


def test_counters_do_not_make_steps_new() -> None:
    class Counter(Stack):
        steps = 0

        def forward(self, x: Tensor, step: int = 0) -> Tensor:
            self.steps = self.steps + 1
            return super().forward(x)

    ours = _optimized(Counter())
    for step in range(3):
        ours(_x(), step=step).sum().backward()
    assert len(ours.autockpt._entries) == 2  # with and without a step number


@dataclass
class _Held:
    """An argument that hides a tensor."""

    value: Tensor


class _Writes(Stack):
    """Writes its batch in place, or by numpy, before anything else."""

    def __init__(self, how: str) -> None:
        super().__init__(dropout=0.0)
        self.how = how
        self.drop = nn.Dropout(inplace=True)

    def forward(self, x: Tensor, other: Any) -> Tensor:
        if self.how == "dropout":
            self.drop(x)
        elif self.how == "mul_":
            x.mul_(2)
        elif self.how == "numpy":
            x.numpy()[:] *= 2
        other["held"][0].value.add_(x.mean())
        return super().forward(x + other["held"][0].value)


def _batch(length: int = 128) -> tuple[Tensor, dict[str, Any]]:
    return _x(length), {"held": [_Held(torch.ones(32))]}


def _bits(batch: tuple[Tensor, dict[str, Any]]) -> list[Tensor]:
    return [batch[0].clone(), batch[1]["held"][0].value.clone()]


@pytest.mark.parametrize("how", ["dropout", "mul_", "numpy"])
def test_planning_leaves_the_batch_and_the_step_writes_it(how: str) -> None:
    torch.manual_seed(0)
    plain = _Writes(how)
    batch = _batch()
    ours = _optimized(plain, *batch, budget="70%")
    autockpt.minimum_budget(plain, batch, emit="modules")
    autockpt.measure(ours, batch)
    autockpt.measure(plain, batch, repeats=2)
    assert all(map(torch.equal, _bits(batch), _bits(_batch())))
    # The second length is planned at its first step, when the model has been trained.
    for length in (128, 144):
        left: list[list[Tensor]] = []
        for model in (plain, ours):
            torch.manual_seed(1)
            model.zero_grad()
            batch = _batch(length)
            loss = model(*batch).square().mean()
            loss.backward()
            left.append([*_bits(batch), loss, *(p.grad.clone() for p in model.parameters())])
        assert ours.autockpt.report.recompute_cost > 0
        assert all(map(torch.equal, *left))


class _Shrinking(nn.Linear):
    """Writes its own weights in forward, one way or the other."""

    def __init__(self, how: str) -> None:
        super().__init__(32, 32)
        self.how = how
        self.table = nn.Embedding(8, 32, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "mul_":
                self.weight.mul_(0.99)
            elif self.how == "clamp_":
                self.weight.data.clamp_(-0.05, 0.05)
            elif self.how == "data":
                self.weight.data = self.weight.data * 0.99
        y = super().forward(x)
        return y + self.table(torch.arange(8)).sum(0) if self.how == "max_norm" else y


@pytest.mark.parametrize("how", ["mul_", "clamp_", "data", "max_norm"])
def test_planning_leaves_parameters_that_a_forward_writes(how: str) -> None:
    torch.manual_seed(0)
    model = Stack(dropout=0.0)
    model.blocks.insert(0, _Shrinking(how))
    before = copy.deepcopy(model)
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    ours = _optimized(model, budget="70%")
    assert ours.autockpt.report.recompute_cost > 0
    assert all(map(torch.equal, model.parameters(), before.parameters()))
    assert [parameter.data_ptr() for parameter in model.parameters()] == memory
    verification = autockpt.verify(before, ours, (_x(),))
    assert verification, verification.differences


def _normed() -> nn.Module:
    def layer() -> nn.Module:
        parts = (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.GELU())
        return nn.Sequential(spectral_norm(parts[0]), *parts[1:])

    return nn.Sequential(*(layer() for _ in range(4)))


def _retained(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def _penalized(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    loss = model(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def _twice_penalized(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    loss = model(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x, create_graph=True)
    (loss + second.square().sum()).backward()


@pytest.mark.parametrize("step", [_retained, _penalized, _twice_penalized])
def test_regions_run_again_as_often_as_they_are_asked(
    step: Callable[[nn.Module, Tensor], None],
) -> None:
    torch.manual_seed(0)
    plain = _normed()
    x = torch.randn(256, 32)
    ours = _optimized(copy.deepcopy(plain), x, budget="75%")
    assert ours.autockpt.report.recompute_cost > 0
    left: list[list[Tensor]] = []
    for model in (plain, ours):
        torch.manual_seed(1)
        step(model, x)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        left.append([*gradients, *model.buffers(), torch.get_rng_state()])
    assert len(left[0]) == len(left[1])
    assert all(map(torch.equal, *left))


class _Average(nn.Linear):
    """Reads and writes a buffer of its own, which regions copy."""

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.register_buffer("mean", torch.zeros(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(self.weight.detach())
        return torch.sin(super().forward(x) + x @ self.mean)


@pytest.mark.parametrize("kind", ["normed", "average", "forgetful"])
def test_the_least_budgets_that_are_named_do(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(250, 32)
    if kind == "normed":
        model = _normed()
    elif kind == "average":
        model = nn.Sequential(*(nn.Sequential(_Average(), nn.GELU()) for _ in range(4)))
    else:
        # Its calls may not run again, which only a check finds out.
        model = nn.Sequential(*(cls() for cls in (Block, _Forgetful, Block, _Forgetful, Block)))
    least = autockpt.minimum_budget(model, (x,), emit="modules")
    ours = autockpt.optimize(model, (x,), memory_budget=least, emit="modules", cost="roofline")
    report = ours.autockpt.report
    assert report.recompute_cost > 0
    assert autockpt.measure(ours, (x,)).peak_bytes <= least
    with pytest.raises(InfeasibleError) as refused:
        small = (3 * least + report.fixed_bytes) // 4
        autockpt.optimize(model, (x,), memory_budget=small, emit="modules", cost="roofline")
    named = refused.value.minimum_bytes
    assert named == least
    autockpt.optimize(model, (x,), memory_budget=named, emit="modules", cost="roofline")
