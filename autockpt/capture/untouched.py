"""The quickest part of a key: whether anything of a model was written to since the last time."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.guards import TensorGuards, dict_version
from torch.nn.modules import module as _module_globals

from autockpt.capture.paths import is_apart
from autockpt.capture.snapshot import CONTAINERS, GLOBAL_HOOKS, is_nested, values_in

_MOST_WAIT = 1024


class Untouched:
    """Gives the same token as long as nothing in a model's namespaces was written to.

    Notes
    -----
    Asks the interpreter for the versions of dicts, which any write moves, and torch's own C++
    guard for the layouts of tensors: a few hundred numbers, where a comparison of all identities
    reads thousands of objects that the step has driven out of the caches. A changed token says
    nothing; an equal one says that a comparison would find what it found before.

    Dicts are held, and with them what a model lets go of until it is asked again: for the handle
    of that model only, which goes with it.
    """

    def __init__(self) -> None:
        self._seen: _Seen | None = None
        self._fruitless = 0
        self._wait = 0

    def token(self, model: nn.Module) -> object | None:
        """Give a token of the model as it is now; None where that is not known."""
        if not _versions_move():
            return None
        seen = self._seen
        if seen is not None and seen.holds(model):
            self._fruitless = self._wait = 0
            return seen.token
        # A model that writes its own attributes at each call is looked at ever more rarely.
        self._seen = None
        if self._wait:
            self._wait -= 1
            return None
        self._wait = min(_MOST_WAIT, 2**self._fruitless - 1)
        self._fruitless += 1
        seen = self._seen = _Seen(model)
        return seen.token


@functools.cache
def _versions_move() -> bool:
    """Whether a write moves a dict's version: from Python 3.12 on torch has to watch for it."""
    sample = {"a": 1}
    before = dict_version(sample)
    sample["a"] = 2
    return bool(dict_version(sample) != before)


class _Seen:
    """Versions and layouts of one moment."""

    def __init__(self, model: nn.Module) -> None:
        # Kept by others: it must hold nothing of the model.
        self.token = object()
        modules = list(model.modules())
        self._modules = list(map(weakref.ref, modules))
        self._classes = list(map(type, modules))
        self._globals = _globals()
        self._dicts: list[dict[Any, Any]] = []
        self._empty: list[Any] = []
        # What has no version: lists and sets by their items, objects by class and slots.
        self._others: list[Any] = []
        tensors: dict[int, torch.Tensor] = {}
        for value in _reached(modules, self._globals):
            if isinstance(value, torch.Tensor):
                tensors[id(value)] = value
            elif isinstance(value, dict) and value:
                # The root's own namespace holds the handle, which would hold it in turn.
                if value is not vars(model):
                    self._dicts.append(value)
            elif isinstance(value, CONTAINERS) and not value:
                self._empty.append(value)
            elif not isinstance(value, (dict, tuple)):
                self._others.append(value)
                if isinstance(space := getattr(value, "__dict__", None), dict):
                    self._dicts.append(space)
        self._versions = list(map(dict_version, (vars(model), *self._dicts)))
        self._items = list(map(_items, self._others))
        self._tensors = list(map(weakref.ref, tensors.values()))
        self._layouts = TensorGuards(
            *tensors.values(), dynamic_dims_sizes=None, dynamic_dims_strides=None
        )

    def holds(self, model: nn.Module) -> bool:
        if model is not self._modules[0]() or any(self._empty):
            return False
        if list(map(dict_version, (vars(model), *self._dicts))) != self._versions:
            return False
        modules = [reference() for reference in self._modules]
        if list(map(type, modules)) != self._classes or _globals() != self._globals:
            return False
        if list(map(_items, self._others)) != self._items:
            return False
        return bool(self._layouts.check(*[reference() for reference in self._tensors]))


def _globals() -> list[Any]:
    return [getattr(_module_globals, name) for name in GLOBAL_HOOKS]


def _items(value: Any) -> list[Any]:
    """Give the class of an object, with identities of what is in it and in no dict."""
    if isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, CONTAINERS):
        return [type(value)]
    return [type(value), *map(id, values_in(value))]


def _reached(modules: list[nn.Module], others: list[Any]) -> Iterator[Any]:
    """Walk what a key looks into: tensors, containers and objects in namespaces, nested."""
    spaces = [vars(module) for module in modules]
    seen = {id(value) for space in spaces for name, value in space.items() if is_apart(name)}
    pending: deque[tuple[Any, int]] = deque((space, -1) for space in spaces)
    pending += [(value, 0) for value in others]
    while pending:
        value, depth = pending.popleft()
        if id(value) in seen:
            continue
        if isinstance(value, torch.Tensor):
            yield value
        elif depth < 0 or is_nested(value, depth):
            seen.add(id(value))
            yield value
            deeper = depth if isinstance(value, CONTAINERS) else max(depth, 1)
            pending += [(inner, deeper + 1) for inner in values_in(value)]
