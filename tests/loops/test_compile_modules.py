"""torch.compile where the emitted forward is no single graph: the model's own Python is traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autockpt
from autockpt.errors import FallbackWarning
from autockpt.runtime.swap import release
from tests import zoo
from tests.autockpt.test_runtime import Mlp, Net, batch
from tests.helpers import assert_same_bits, buffers_restored, equal, run_case, run_step
from tests.loops.test_compile import ASKING, BACKENDS, Masked, _fresh, breaks, peak, planned

__all__ = ["_fresh"]


class Asking(Net):
    """Asks its batch for a value, unless it is traced."""

    def forward(self, x: Tensor, scale: float = 0.5, *, flip: bool = False) -> Tensor:
        if not torch.compiler.is_compiling() and bool((x > 1e6).any()):
            x = x.clamp(max=1e6)
        return super().forward(x, scale, flip=flip)


class Leaving(nn.Module):
    """Leaves a result in an attribute of a part, which a checkpoint of the compiler refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Mlp() for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        self.last = x.detach()
        return x


class Noted(Mlp):
    """A block that leaves what it was given in an attribute."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.given = 2 * x
        return super().forward(x, scale=scale)


def case_of(model: nn.Module) -> zoo.Case:
    return zoo.Case(model.train(), (batch(),), {}, torch.sum)


def whole(model: nn.Module, backend: str = "aot_eager") -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def compiled_regions(model: Any) -> frozenset[str]:
    return frozenset(model.autockpt._entries[0].compiled.regions())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("training", [True, False])
def test_equal_to_the_plain_model_compiled(backend: str, training: bool) -> None:
    case = case_of(Asking())
    case.model.train(training)
    ours = planned(case)
    assert ours.autockpt._entries[0].step.program.has_guards
    plain, compiled = whole(copy.deepcopy(case.model), backend), whole(ours, backend)
    for seed in (1, 2):
        expected = run_step(plain, case.args, loss=torch.sum, seed=seed)
        found = run_step(compiled, case.args, loss=torch.sum, seed=seed)
        assert_same_bits(expected, found)
    assert compiled_regions(ours)
    with torch.no_grad():
        ours.eval()
        plain.eval()
        assert equal(plain(*case.args), compiled(*case.args))


@pytest.mark.parametrize("model", [Net, Asking])
def test_the_saving_is_kept(model: type[nn.Module]) -> None:
    case = case_of(model())
    ours = planned(case)
    plain_peak = peak(case, whole(copy.deepcopy(case.model)))
    torch._dynamo.reset()
    assert peak(case, whole(ours)) < 0.7 * plain_peak


@pytest.mark.parametrize("name", ASKING)
def test_real_models_that_ask(name: str) -> None:
    case = zoo.ZOO[name]()
    plain = whole(copy.deepcopy(case.model))
    expected, plain_peak = run_case(case, plain), peak(case, plain)
    torch._dynamo.reset()
    ours = planned(case)
    assert_same_bits(expected, run_case(case, whole(ours)))
    assert peak(case, whole(ours)) < 0.7 * plain_peak


def test_the_eager_step_stays_as_it_was() -> None:
    case = case_of(Asking())
    ours = planned(case)
    eager, code, (entry,) = run_case(case, ours), ours.autockpt.code, ours.autockpt._entries
    with buffers_restored(ours):
        whole(ours)(*case.args).sum().backward()
    assert_same_bits(eager, run_case(case, ours))
    assert ours.autockpt._entries == (entry,)
    assert ours.autockpt.code == code
    twin = copy.deepcopy(ours)
    assert_same_bits(eager, run_case(case, twin))
    # A module for the user to look at, whatever happened in it.
    assert all(isinstance(block, Mlp) for block in ours.blocks)
    classes = [type(module) for module in case.model.modules()]
    assert [type(module) for module in release(twin).modules()] == classes
    for part, plain in zip(twin.blocks, case.model.blocks, strict=True):
        assert set(vars(part)) == set(vars(plain))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "gain", 0.7),
        lambda m: m.norm.eval(),
        lambda m: m.eval(),
        lambda m: m.blocks[0].requires_grad_(False),
        lambda m: m.blocks.append(copy.deepcopy(m.blocks[0])),
        lambda m: m.blocks[1].register_forward_hook(lambda _, args, output: 2 * output),
        lambda m: m.load_state_dict(Net().state_dict(), assign=True),
    ],
)
def test_changes_of_the_module_are_noticed(change: Any) -> None:
    case = case_of(Asking())
    plain = copy.deepcopy(case.model)
    ours = planned(case)
    compiled = torch.compile(ours, backend="aot_eager")
    for _ in range(3):
        for model in (plain, compiled):
            torch.manual_seed(1)
            model.zero_grad()
            model(batch()).sum().backward()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            assert equal(p.grad, q.grad)
        for model in (plain, ours):
            torch.manual_seed(2)
            change(model)


class Hidden(Masked):
    """Its mask is drawn in a part, and it asks."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Masked()

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and bool((x > 1e6).any()):
            x = x.clamp(max=1e6)
        return self.part(x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_of_forward_and_backward_are_one(backend: str) -> None:
    x = torch.randn(512, 256).requires_grad_()
    ours: Any = autockpt.optimize(
        Hidden(), (x,), memory_budget="70%", cost="roofline", solver="interval_dp"
    )
    compiled = whole(ours, backend)
    for _ in range(2):
        y = compiled(x)
        x.grad = None
        y.sum().backward()
        assert 0.45 < float((y != 0).float().mean()) < 0.55
        assert torch.equal(y != 0, x.grad != 0)
    (region,) = compiled_regions(ours)
    assert region in ("part", "part.drop")


def test_a_result_in_an_attribute() -> None:
    case = case_of(Leaving())
    ours = planned(case, "60%")
    assert ours.autockpt._entries[0].step.capture.left
    compiled, plain = whole(ours), copy.deepcopy(case.model)
    assert_same_bits(run_case(case, whole(plain)), run_case(case, compiled))
    assert equal(plain.last, ours.last)
    assert compiled_regions(ours)


def test_what_a_checkpoint_of_the_compiler_does_not_take_is_no_region() -> None:
    model = Leaving()
    model.noted = nn.ModuleList([Noted(128), Noted(128)])
    case = case_of(nn.Sequential(model, nn.Linear(32, 128), *model.noted))
    ours = planned(case, "75%")
    plain = copy.deepcopy(case.model)
    expected = run_case(case, whole(plain))
    torch._dynamo.reset()
    with pytest.warns(FallbackWarning, match="does not run again"):
        assert_same_bits(expected, run_case(case, whole(ours)))
    assert equal(plain[2].given, ours[2].given)
    assert compiled_regions(ours)
    assert not {"0.noted.0", "0.noted.1"} & compiled_regions(ours)


def test_a_budget_below_what_modules_can_do() -> None:
    case = case_of(Asking())
    ours = planned(case, "46%")
    plain_peak = peak(case, whole(copy.deepcopy(case.model)))
    torch._dynamo.reset()
    assert peak(case, whole(ours)) < 0.7 * plain_peak


def modules_asked_for() -> zoo.Case:
    return case_of(Net())


@pytest.mark.parametrize("build", [modules_asked_for, zoo.vit])
def test_regions_that_were_modules_from_the_start(build: Callable[[], zoo.Case]) -> None:
    case = build()
    ours: Any = autockpt.optimize(
        copy.deepcopy(case.model),
        case.args,
        case.kwargs,
        loss=case.loss,
        memory_budget="60%",
        cost="roofline",
        emit="modules",
    )
    assert ours.autockpt.plan.regions
    with buffers_restored(ours):
        assert breaks(ours, case) == (1, 0)
    torch._dynamo.reset()
    plain = copy.deepcopy(case.model)
    assert_same_bits(run_case(case, whole(plain)), run_case(case, whole(ours)))


def test_a_forward_that_is_no_graph_in_plain_is_none_with_us() -> None:
    class Printing(Asking):
        def forward(self, x: Tensor, scale: float = 0.5, *, flip: bool = False) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x, scale, flip=flip)

    case = case_of(Printing())
    ours = planned(case)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        whole(ours)(*case.args)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager")
    plain = torch.compile(copy.deepcopy(case.model), backend="aot_eager")
    assert_same_bits(run_case(case, plain), run_case(case, compiled))
