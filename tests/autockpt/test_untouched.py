"""The token of a model changes with whatever a key would notice, and with nothing a step does."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autockpt
from autockpt.capture.key import Key
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
