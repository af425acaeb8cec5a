"""What a forward leaves behind besides its output: attributes, hooks of its parts."""

from __future__ import annotations

import copy
import gc
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import autockpt
from autockpt.errors import CaptureError
from tests.helpers import equal


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Last(Mlp):
    """Leaves its result, and an auxiliary loss, where its caller finds them."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        self.aux = {"loss": self.last.pow(2).mean(), "parts": (x, 3)}
        return self.last


class Load(Mlp):
    """Counts in a tensor that is not there at first."""

    seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        load = y.detach().abs().sum(0)
        if self.seen is None:
            self.seen = load
        else:
            self.seen += load
        return y


class Total(Mlp):
    """Adds to a tensor that is in no table of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.total = [torch.zeros(16)]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.total[0][2:] += y.detach().mean(0)[2:]
        return y + self.total[0]


class Mean(Mlp):
    """Computes with a mean that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x) * (1 + self.mean))
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y + self.mean


def batch(rows: int = 400) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))


def planned(model: nn.Module, budget: str = "80%", **settings: Any) -> Any:
    return autockpt.optimize(model, (batch(),), memory_budget=budget, cost="roofline", **settings)


def pair(make: type[nn.Module], depth: int = 6) -> tuple[nn.Sequential, Any]:
    plain = nn.Sequential(*[make() for _ in range(depth)])
    return plain, planned(copy.deepcopy(plain))


def assert_step_alike(plain: nn.Module, optimized: nn.Module, x: Tensor, loss: Any) -> None:
    for model in (plain, optimized):
        model.zero_grad()
        loss(model, model(x)).backward()
    for p, q in zip(plain.parameters(), optimized.parameters(), strict=True):
        assert equal(p.grad, q.grad)


@pytest.mark.parametrize("make", [Last, Load, Total, Mean])
def test_what_is_left_in_attributes(make: type[nn.Module]) -> None:
    plain, optimized = pair(make)
    assert optimized.autockpt.plan.regions
    before = {name: value for name, value in vars(plain[0]).items() if isinstance(value, Tensor)}
    for rows in (400, 400, 300, 400):
        assert_step_alike(plain, optimized, batch(rows), lambda _, y: y.pow(2).sum())
        for a, b in zip(plain, optimized, strict=True):
            assert list(vars(a)) == list(vars(b))
            for name in ("last", "seen", "mean"):
                assert equal(getattr(a, name, None), getattr(b, name, None))
            if isinstance(a, Total):
                assert equal(a.total[0], b.total[0])
    assert len(optimized.autockpt._entries) <= 4
    assert all(isinstance(value, Tensor) for value in before.values())


def test_a_loss_of_what_is_left() -> None:
    plain, optimized = pair(Last)

    def loss(model: Any, y: Tensor) -> Tensor:
        return torch.stack([y.sum(), *(part.aux["loss"] for part in model)]).sum()

    for _ in range(3):
        assert_step_alike(plain, optimized, batch(), loss)
        assert optimized[1].aux["parts"][1] == 3


def test_planning_leaves_nothing_in_attributes() -> None:
    for make in (Last, Load, Total, Mean):
        model = nn.Sequential(*[make() for _ in range(3)])
        before = [dict(vars(module)) for module in model.modules()]
        values = copy.deepcopy([vars(part).get("mean", 0) for part in model])
        planned(model)
        assert before == [dict(vars(module)) for module in model.modules()]
        assert all(map(equal_or_same, values, [vars(part).get("mean", 0) for part in model]))
        if make is Total:
            assert not any(cast(Total, part).total[0].any() for part in model)


def equal_or_same(a: Any, b: Any) -> bool:
    return equal(a, b) if isinstance(a, Tensor) else a == b


def test_what_is_left_does_not_pile_up() -> None:
    _, optimized = pair(Last)
    counts = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):
            optimized(batch()).sum().backward()
            counts.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[-1] == counts[-3]


def test_a_number_that_is_left_is_refused() -> None:
    class Counter(Mlp):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) / self.calls

    model = nn.Sequential(*[Counter() for _ in range(6)])
    with pytest.raises(CaptureError, match=r"attribute 'calls' of '0'"):
        planned(model, emit="graph")


# Backward hooks of parts.


class Fork(nn.Module):
    """Called with a tensor, a number and a tensor; returns a tensor, None and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.m = Mlp()

    def forward(self, x: Tensor, factor: float, other: Tensor) -> tuple[Tensor, None, Tensor]:
        return self.m(x) * factor, None, torch.tanh(other)


class Forks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.forks = nn.ModuleList([Fork() for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        other = x
        x = torch.tanh(self.first(x))
        for fork in self.forks:
            x, _, other = fork(x, 0.5, other)
        return x + other


def hooked(model: Any, seen: list[Any]) -> Any:
    """Hooks that look, and hooks that change what they see."""

    def look(name: str) -> Any:
        return lambda _, *gradients: seen.append((name, copy.deepcopy(gradients)))

    model.first.register_full_backward_hook(look("first"))
    model.forks[1].register_full_backward_hook(look("fork"))
    model.forks[1].m.down.register_full_backward_pre_hook(look("down"))
    model.forks[2].m.register_full_backward_hook(lambda m, gi, go: tuple(2 * g for g in gi))
    model.forks[4].m.up.register_full_backward_pre_hook(lambda m, go: tuple(3 * g for g in go))
    return model


def flat(value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value]
    return [leaf for item in value for leaf in flat(item)]


@pytest.mark.parametrize("budget", ["100%", "60%"])
def test_backward_hooks_of_parts(budget: str) -> None:
    expected: list[Any] = []
    found: list[Any] = []
    bare = Forks()
    plain = hooked(copy.deepcopy(bare), expected)
    optimized = planned(hooked(bare, found), budget)
    assert not found
    assert bool(optimized.autockpt.plan.regions) == (budget == "60%")
    for rows in (400, 300, 400):
        with pytest.warns(UserWarning, match="no inputs require gradients"):
            assert_step_alike(plain, optimized, batch(rows), lambda _, y: y.pow(2).sum())
    assert len(expected) == 9
    assert all(map(equal_or_same, flat(found), flat(expected)))
    assert len(flat(found)) == len(flat(expected))


def test_backward_hooks_of_all_modules() -> None:
    seen: list[str] = []
    plain = nn.Sequential(*[Mlp() for _ in range(4)])
    optimized = planned(copy.deepcopy(plain), "70%")
    handle = nn.modules.module.register_module_full_backward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        x = batch().requires_grad_()
        assert_step_alike(plain, optimized, x, lambda _, y: y.sum())
    finally:
        handle.remove()
    assert len(seen) == 26
    assert seen[:13] == seen[13:]


def test_backward_hooks_see_each_of_several_forwards() -> None:
    expected: list[Any] = []
    found: list[Any] = []
    bare = Forks()
    plain = hooked(copy.deepcopy(bare), expected)
    optimized = planned(hooked(bare, found), "60%")

    def loss(model: nn.Module, y: Tensor) -> Tensor:
        return y.sum() + model(-y).pow(2).sum()

    for _ in range(2):
        assert_step_alike(plain, optimized, batch().requires_grad_(), loss)
    assert all(map(equal_or_same, flat(found), flat(expected)))
    assert len(flat(found)) == len(flat(expected))


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_backward_hooks_of_the_old_kind_are_refused() -> None:
    model = nn.Sequential(Mlp(), Mlp())
    model[0].register_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="register_full_backward_hook"):
        planned(model)


class Bank(nn.Module):
    """Writes a memory bank, and Python asks for a value after that: both may have to be undone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(8)
        )
        self.register_buffer("bank", torch.zeros(512, 64))
        self.register_buffer("other", torch.zeros(4096, 64))
        self.register_buffer("place", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.bank[:32].copy_(x[:32])
        for layer in self.layers:
            x = layer(x)
        if int(self.place) < 2:
            return x.mean()
        return (x @ self.bank.t()).mean()


def test_copies_of_what_is_written_before_a_guard_count() -> None:
    torch.manual_seed(0)
    plain, x = Bank(), torch.randn(512, 64)
    ours = autockpt.optimize(copy.deepcopy(plain), (x,), memory_budget="70%", cost="roofline")
    report = ours.autockpt.report
    random_bytes = torch.get_rng_state().nbytes
    assert ours.autockpt.problem.forward_bytes == plain.bank.nbytes + random_bytes
    assert report.plain_peak_bytes == autockpt.measure(plain, (x,)).peak_bytes
    measured = autockpt.measure(ours, (x,)).peak_bytes
    assert measured <= report.budget_bytes
    assert measured == report.peak_bytes
    for place in range(4):
        for model in (plain, ours):
            model.place.fill_(place)
        x = torch.randn(512, 64)
        assert torch.equal(ours(x), plain(x))
        assert torch.equal(ours.bank, plain.bank)


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")
def test_buffers_that_the_first_forward_gives_a_size() -> None:
    from torch.ao import quantization

    def made() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)]
        stubs = quantization.QuantStub(), quantization.DeQuantStub()
        model = nn.Sequential(stubs[0], *layers, stubs[1]).train()
        model.qconfig = quantization.get_default_qat_qconfig("x86")
        return cast(nn.Module, quantization.prepare_qat(model))

    plain, given, x = made(), made(), torch.randn(256, 32)
    sizes = {name: buffer.shape for name, buffer in given.named_buffers()}
    ours = autockpt.optimize(given, (x,), memory_budget="80%", cost="roofline", loss=torch.sum)
    assert {name: buffer.shape for name, buffer in given.named_buffers()} == sizes
    assert autockpt.verify(plain, ours, (x,), loss=torch.sum)
    for _ in range(3):
        for model in (plain, ours):
            model(x).sum().backward()
        pairs = zip(plain.parameters(), ours.parameters(), strict=True)
        assert all(equal(p.grad, q.grad) for p, q in pairs)
        assert all(map(equal, plain.buffers(), ours.buffers()))
