"""The token of a model changes with whatever a key would notice, and with nothing a step does."""

from __future__ import annotations

import array
import copy
import functools
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autockpt
from autockpt.capture.key import Key, _describe_model
from autockpt.capture.untouched import Untouched
from tests.autockpt.test_runtime import Mlp, Net, batch


class Slots:
    """An object without a namespace."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class Rich(Net):
    """With everything that can hang on a module."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(rate=0.1, sizes=[1, 2])
        self.slots = Slots()
        self.names = ["a", "b"]
        self.flags = {1, 2}
        self.table = {"k": {"deep": 1}, "t": torch.zeros(3)}
        self.nothing: list[int] = []


class Other(Mlp):
    """A class to become."""


def becomes(module: Any) -> None:
    module.__class__ = Other


CHANGES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda m: setattr(m, "gain", 0.5),
    "new attribute": lambda m: setattr(m, "fresh", 1),
    "deep attribute": lambda m: setattr(m.drop, "p", 0.4),
    "mode": lambda m: m.norm.eval(),
    "layer": lambda m: setattr(m.blocks[2], "up", nn.Linear(32, 128)),
    "appended": lambda m: m.blocks.append(Mlp()),
    "class": lambda m: becomes(m.blocks[0]),
    "hook": lambda m: m.blocks[1].register_forward_hook(lambda *_: None),
    "parameter": lambda m: setattr(m.norm, "weight", nn.Parameter(torch.ones(32))),
    "buffer": lambda m: setattr(m.norm, "running_mean", torch.ones(32)),
    "frozen": lambda m: m.blocks[0].up.weight.requires_grad_(False),
    "data": lambda m: setattr(m.norm.bias, "data", torch.ones(32, dtype=torch.float64)),
    "strides": lambda m: setattr(m.blocks[0].up.weight, "data", torch.ones(32, 128).t()),
    "config": lambda m: setattr(m.config, "rate", 0.2),
    "config's list": lambda m: m.config.sizes.append(3),
    "slots": lambda m: setattr(m.slots, "value", 2),
    "list": lambda m: m.names.__setitem__(0, "c"),
    "set": lambda m: m.flags.add(3),
    "dict": lambda m: m.table["k"].update(deep=2),
    "tensor in a dict": lambda m: m.table["t"].requires_grad_(),
    "empty list": lambda m: m.nothing.append(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_change_the_token(change: Callable[[Any], object]) -> None:
    model, untouched = Rich(), Untouched()
    token = untouched.token(model)
    assert token is not None
    assert untouched.token(model) is token
    change(model)
    assert untouched.token(model) is not token


class SlotsAndMore(Slots):
    """An object with slots and a namespace."""


class Act:
    """A callable with a state."""

    def __init__(self) -> None:
        self.slope = 0.1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.slope


class OwnList(list[Any]):
    """A list with attributes."""


class OwnDict(dict[str, Any]):
    """A dict with attributes, and of no truth."""

    def __bool__(self) -> bool:
        raise RuntimeError

    __len__ = None  # type: ignore[assignment]


class Odd:
    """Equal to nothing, and says so loudly."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = object.__hash__


class Bare:
    """An object without anything."""


class BareSlots:
    """An object with a slot that is not set."""

    __slots__ = ("value",)


def more(value: Any) -> Any:
    value.more = 1
    return value


def ordered(module: nn.Linear) -> None:
    """Move the first of two hooks behind the other."""
    hooks: Any = module._forward_hooks
    hooks.move_to_end(next(iter(hooks)))


def hooked() -> nn.Linear:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    module.register_forward_hook(lambda *_: None)
    return module


def renamed(table: dict[str, Any]) -> None:
    table["other"] = table.pop("k")


# What an attribute is, and how it changes without being replaced.
IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "array": (lambda: np.array([1.0, 2.0]), lambda v: v.fill(2.0)),
    "array in a list": (lambda: [np.array([1.0])], lambda v: v[0].fill(2.0)),
    "array in an object": (lambda: SimpleNamespace(a=np.zeros(2)), lambda v: v.a.fill(1.0)),
    "bytes": (lambda: bytearray(b"a"), lambda v: v.extend(b"b")),
    "python's array": (lambda: array.array("d", [1.0]), lambda v: v.__setitem__(0, 2.0)),
    "slot beside a namespace": (lambda: more(SlotsAndMore()), lambda v: setattr(v, "value", 2)),
    "slot unset": (Slots, lambda v: delattr(v, "value")),
    "object in a list": (lambda: [more(SlotsAndMore())], lambda v: setattr(v[0], "value", 2)),
    "partial": (lambda: functools.partial(max, key=1), lambda v: v.keywords.update(key=2)),
    "partial of a callable": (
        lambda: functools.partial(Act(), torch.ones(1)),
        lambda v: setattr(v.func, "slope", 2),
    ),
    "namespace": (lambda: more(Bare()), lambda v: setattr(v, "__dict__", {"more": 2})),
    "first attribute": (Bare, lambda v: setattr(v, "more", 1)),
    "first slot": (BareSlots, lambda v: setattr(v, "value", 1)),
    "renamed": (lambda: {"k": 1}, renamed),
    "callable": (Act, lambda v: setattr(v, "slope", 0.9)),
    "bound method": (lambda: Act().__call__, lambda v: setattr(v.__self__, "slope", 0.9)),
    "bound method in a dict": (
        lambda: {"f": Act().__call__},
        lambda v: setattr(v["f"].__self__, "slope", 0.9),
    ),
    "hidden module": (lambda: [nn.Dropout()], lambda v: v[0].eval()),
    "hidden module's attribute": (lambda: {"k": nn.Dropout()}, lambda v: more(v["k"])),
    "hidden module's part": (lambda: [Mlp()], lambda v: v[0].up.eval()),
    "hidden module's layer": (
        lambda: [Mlp()],
        lambda v: setattr(v[0], "up", nn.Linear(32, 128)),
    ),
    "hidden module's class": (lambda: [Mlp()], lambda v: becomes(v[0])),
    "order": (lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    "order of hooks": (hooked, ordered),
    "list's attribute": (lambda: more(OwnList([1])), lambda v: setattr(v, "more", 2)),
    "list's first attribute": (OwnList, lambda v: setattr(v, "more", 2)),
    "dict's attribute": (lambda: more(OwnDict(a=1)), lambda v: setattr(v, "more", 2)),
    "odd dict": (lambda: OwnDict(a=1), lambda v: v.update(a=2)),
    "odd object": (lambda: [Odd()], lambda v: v.__setitem__(0, Odd())),
    "a set's class of number": (lambda: {1}, lambda v: (v.clear(), v.add(True))),
    "module's namespace": (
        lambda: nn.Dropout(),
        lambda v: setattr(v, "__dict__", {**vars(v), "p": 0.9}),
    ),
}


@pytest.mark.parametrize(("make", "change"), IN_PLACE.values(), ids=IN_PLACE)
def test_changes_in_place_are_seen(
    make: Callable[[], Any], change: Callable[[Any], object]
) -> None:
    model, untouched, x = Net(), Untouched(), batch()
    model.held = value = make()
    key, token = Key.take(model, (x,)), untouched.token(model)
    assert token is not None
    assert untouched.token(model) is token
    assert key._fast.holds(model)
    assert key._model == _describe_model(model)
    change(value)
    assert untouched.token(model) is not token
    assert not key._fast.holds(model)
    assert key._model != _describe_model(model)
    assert not key.matches(model, (x,), token=untouched.token(model))


def test_an_address_used_again_is_no_same_value() -> None:
    model: Any = Net()
    untouched = Untouched()
    model.values = [float("1.25")]
    token = untouched.token(model)
    for _ in range(2):
        model.values[0] *= 1.5
    assert untouched.token(model) is not token


def test_a_global_hook_changes_the_token() -> None:
    model, untouched = Rich(), Untouched()
    token = untouched.token(model)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert untouched.token(model) is not token
    finally:
        handle.remove()


def test_a_step_does_not() -> None:
    model, untouched = Rich(), Untouched()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    token = untouched.token(model)
    for _ in range(2):
        model.train()
        optimizer.zero_grad()
        model(batch()).sum().backward()
        optimizer.step()
        assert untouched.token(model) is token
    assert untouched.token(copy.deepcopy(model)) is not token


def test_a_token_spares_the_comparison() -> None:
    model = Net()
    key, untouched = Key.take(model, (batch(),)), Untouched()
    assert key.matches(model, (batch(),), token=untouched.token(model))
    model.gain = 0.5
    assert not key.matches(model, (batch(),), token=untouched.token(model))
    assert not key.matches(model, (batch(),), token=untouched.token(model))
    model.gain = 1.0
    assert key.matches(model, (batch(),), token=untouched.token(model))


def test_a_model_that_never_rests_is_looked_at_rarely() -> None:
    model, untouched = Net(), Untouched()
    known = 0
    for step in range(200):
        model.count = step
        known += untouched.token(model) is not None
    assert 3 < known < 12
    # And as before once it does.
    while untouched.token(model) is None:
        pass
    assert untouched.token(model) is untouched.token(model)


def test_nothing_is_kept() -> None:
    ours: Any = autockpt.optimize(
        Net(), (batch(),), memory_budget="60%", cost="roofline", solver="interval_dp"
    )
    for _ in range(2):
        ours(batch())
    # A module that refers to itself, so that what holds its namespace holds it.
    ours.blocks[0].me = [ours.blocks[0]]
    ours(batch())
    gone = weakref.ref(ours.blocks[0])
    ours.blocks[0] = Mlp()
    ours(batch())
    gc.collect()
    assert gone() is None
    gone = weakref.ref(ours)
    ours.blocks[0].me = [ours]
    ours(batch())
    del ours
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["to_sparse_csr", "to_sparse_csc", "to_sparse"])
def test_a_buffer_that_has_no_strides(layout: str) -> None:
    """Torch's own guard ends the process over a compressed one."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
            edges = getattr((torch.rand(64, 64) < 0.1).float(), layout)()
            self.register_buffer("edges", edges, persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(torch.sparse.mm(self.edges, x)))
            return x.square().mean()

    torch.manual_seed(0)
    model, x = Graph(), torch.randn(64, 32)
    ours = autockpt.optimize(model, (x,), memory_budget="80%", cost="roofline")
    for _ in range(2):
        assert torch.equal(ours(x), model(x))
        assert autockpt.verify(model, ours, (x,))
