"""How regions run: when backward asks, as often as it asks, and no longer held than wanted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import GraphExecGroup, set_checkpoint_early_stop

from autockpt.regions import checkpointed as regions
from autockpt.regions import surroundings
from solvers.plan import Plan
from tests.autockpt.plans import captured
from tests.helpers import assert_same_bits, count_calls, equal


class Asking(torch.autograd.Function):
    """Asks for what it saved one by one, as much code does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[1], gradient * ctx.saved_tensors[0]


class Net(nn.Module):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor] = torch.mul) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self._product = product

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = self._product(torch.sigmoid(x), torch.exp(x))
        return torch.tanh(self.second(x))


def recorded(net: nn.Module):
    torch.manual_seed(0)
    return captured(net, (torch.randn(4, 8),), {}, lambda y: y.square().sum())


def in_one_region(real):
    last = max(i for i, op in enumerate(real.problem.ops) if op.target.endswith("tanh"))
    return real.emitted(Plan.flat([(0, last + 1)]))


@pytest.fixture
def real():
    return recorded(Net())


@pytest.fixture
def emitted(real):
    return in_one_region(real)


def test_saved_tensors_may_be_asked_for_more_than_once():
    """Of torch's own function that is an error."""
    real = recorded(Net(Asking.apply))
    assert_same_bits(real.step(), real.step(in_one_region(real)))


@pytest.mark.parametrize("saving", ["as torch does now", "as it did before 2.13"])
def test_arguments_are_held_as_autograd_holds_them(real, emitted, saving, monkeypatch):
    if saving == "as it did before 2.13":
        monkeypatch.setattr(surroundings, "_make_saved", None)
    assert_same_bits(real.step(), real.step(emitted))
    x = torch.randn(4, 8).requires_grad_().clone()
    loss = emitted(x).sum()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_of_the_caller_see_the_arguments(emitted):
    x = torch.randn(4, 8).requires_grad_().clone()
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = emitted(x).sum()
    assert x.data_ptr() in seen
    loss.backward()


def linears(call: Any) -> int:
    return sum(n for name, n in count_calls(call).items() if "addmm" in name)


def test_every_backward_pass_runs_it_once_and_a_group_of_passes_too(real, emitted):
    x = torch.randn(4, 8, requires_grad=True)

    def passes() -> None:
        y = emitted(x)
        for _ in range(2):
            torch.autograd.grad(y.sum(), x, retain_graph=True)

    assert linears(passes) == 2 + 2 * 2

    def in_two_parts(group: AbstractContextManager[Any]) -> None:
        y = emitted(x)
        assert y.grad_fn is not None
        before_tanh = GradientEdge(y.grad_fn.next_functions[0][0], 0)
        with group:
            last = torch.autograd.grad(y.sum(), before_tanh, retain_graph=True)
            torch.autograd.grad(before_tanh, x, last, retain_graph=True)

    assert linears(lambda: in_two_parts(nullcontext())) == 2 + 2 * 2
    assert linears(lambda: in_two_parts(GraphExecGroup())) == 2 + 2


@pytest.mark.parametrize("early", [False, True])
def test_a_setting_of_torchs_function_has_torchs_function(real, emitted, early, monkeypatch):
    def never(*_: Any) -> None:
        raise AssertionError("not torch's")

    monkeypatch.setattr(regions, "_run", never)
    with set_checkpoint_early_stop(early):
        found = real.step(emitted)
    assert_same_bits(real.step(), found)


def test_what_is_made_again_dies_with_the_last_need_of_it():
    alive: list[weakref.ref[Tensor]] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.exp()
            ctx.save_for_backward(y)
            alive.append(weakref.ref(y.untyped_storage()))
            return y * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            return gradient * y

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(Watched.apply(torch.sin(self.lin(x))))

    real = recorded(Two())
    emitted = in_one_region(real)
    alive.clear()
    loss = emitted(*real.args).sum()
    forward = len(alive)
    loss.backward(retain_graph=True)
    assert len(alive) > forward
    assert all(reference() is None for reference in alive)
    loss.backward()
    assert all(reference() is None for reference in alive)


def test_gradients_of_gradients(real, emitted):
    x = real.args[0].clone().requires_grad_()

    def second(model: nn.Module) -> list[Tensor]:
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return [*torch.autograd.grad(gradient.square().sum(), [x, *model.parameters()])]

    for a, b in zip(second(real.model), second(emitted), strict=True):
        assert equal(a, b)


def test_who_asks_more_than_once_stays_outside_regions():
    """Each time but the first a region would run again for one tensor."""
    asking, once = recorded(Net(Asking.apply)), recorded(Net())
    assert [op.pinned for op in asking.problem.ops if op.target.endswith("apply")] == [True]
    assert not any(op.pinned for op in once.problem.ops[:-2])


def test_hooks_of_the_caller_may_give_arguments_back_in_another_layout():
    class Heads(nn.Module):
        """What goes into the region is turned: its sums are taken along strides."""

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.lin(x)).view(8, 16, 4, 16).transpose(1, 2)
            return torch.softmax(x @ x.transpose(-2, -1), -1).exp().tanh()

    torch.manual_seed(0)
    real = captured(Heads(), (torch.randn(8, 16, 64),), {}, lambda y: y.square().sum())
    ops = [op.target.rpartition(".")[2] for op in real.problem.ops]
    start = ops.index("transpose") + 1
    emitted = real.emitted(Plan.flat([(start, len(ops) - 2)]))
    seen = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.is_contiguous())
        return tensor.detach().contiguous()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = real.loss(emitted(*real.args))
    assert not all(seen)
    strides = []
    original = surroundings.laid_out

    def noting(tensor: Tensor, layout: Any) -> Tensor:
        found = original(tensor, layout)
        assert found.stride() == layout[0]
        strides.append(layout[0])
        return found

    real.model.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surroundings, "laid_out", noting)
        loss.backward()
    assert strides
    found = [p.grad for p in real.model.parameters()]
    real.model.zero_grad()
    real.loss(real.model(*real.args)).backward()
    for gradient, p in zip(found, real.model.parameters(), strict=True):
        assert equal(gradient, p.grad)


class Failing(torch.autograd.Function):
    """Fails when it is told to, as out of memory would."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        if Failing.fails:
            raise MemoryError("there is none")
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return gradient * y, gradient * x


def test_a_recomputation_that_fails_holds_nothing(monkeypatch):
    def held() -> int:
        return sum(len(o.made) for o in gc.get_objects() if type(o) is regions._Ticket)

    real = recorded(Net(Failing.apply))
    emitted = in_one_region(real)
    loss = emitted(*real.args).square().sum()
    gc.collect()
    before = held()
    monkeypatch.setattr(Failing, "fails", True)
    with pytest.raises(MemoryError, match="there is none") as caught:
        loss.backward(retain_graph=True)
    assert "which runs again in backward" in caught.value.__notes__[0]
    del caught
    assert held() == before
    monkeypatch.setattr(Failing, "fails", False)
    loss.backward()
    assert held() == before
