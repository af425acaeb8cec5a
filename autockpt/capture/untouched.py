"""The quickest part of a key: whether anything of a model was written to since the last time."""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.guards import TensorGuards, dict_version
from torch.nn.modules import module as _module_globals

from autockpt.capture.freeze import freeze_data
from autockpt.capture.paths import CONTAINERS, DATA, EXACT, is_apart, slots_of
from autockpt.capture.snapshot import GLOBAL_HOOKS, Held, depth_in, is_nested, values_in

_MOST_WAIT = 1024
_space_of = operator.attrgetter("__dict__")


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
        # Of the modules' own namespaces the versions, which no two dicts share: they may be
        # replaced, and the root's holds the handle, which would hold it in turn.
        self._spaces = list(map(dict_version, map(_space_of, modules)))
        apart = {id(vars(module)) for module in modules}
        # What has no version: lists and sets by their items, objects by class and slots.
        self._others: list[Any] = []
        self._fixed: list[Any] = []
        self._held = Held()
        tensors: dict[int, torch.Tensor] = {}
        for value in _reached(modules, self._globals):
            if isinstance(value, torch.Tensor):
                tensors[id(value)] = value
            else:
                self._add(value, apart)
        self._versions = list(map(dict_version, self._dicts))
        self._items = list(map(_items, self._others))
        # Torch's guard asks for strides, which other layouts answer by ending the process.
        strided = [t for t in tensors.values() if t.layout is torch.strided]
        self._tensors = list(map(weakref.ref, strided))
        self._layouts = TensorGuards(*strided, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        sparse = [t for t in tensors.values() if t.layout is not torch.strided]
        self._sparse = list(map(weakref.ref, sparse))
        self._looks = list(map(_look, self._sparse))

    def _add(self, value: Any, apart: set[int]) -> None:
        kind = type(value)
        if kind in _FIXED:
            self._fixed.append(value)
        elif kind in EXACT and not value:
            self._empty.append(value)
        elif kind is dict:
            if id(value) not in apart:
                self._dicts.append(value)
        else:
            self._others.append(value)
            if isinstance(value, dict):
                self._dicts.append(value)
            if isinstance(space := getattr(value, "__dict__", None), dict):
                self._dicts.append(space)
            if not isinstance(value, DATA):
                for item in _unversioned(value):
                    self._held.add(item)

    def holds(self, model: nn.Module) -> bool:
        if model is not self._modules[0]() or any(self._empty) or self._held.gone:
            return False
        if list(map(dict_version, self._dicts)) != self._versions:
            return False
        modules: Any = [reference() for reference in self._modules]
        if list(map(type, modules)) != self._classes or _globals() != self._globals:
            return False
        if list(map(dict_version, map(_space_of, modules))) != self._spaces:
            return False
        if list(map(_items, self._others)) != self._items:
            return False
        if list(map(_look, self._sparse)) != self._looks:
            return False
        return bool(self._layouts.check(*[reference() for reference in self._tensors]))


def _look(reference: weakref.ref[torch.Tensor]) -> tuple[Any, ...]:
    """Give what a key compares of a tensor that has no strides."""
    tensor = reference()
    if tensor is None:
        return ()
    return type(tensor), tensor.layout, tensor.shape, tensor.dtype, tensor.requires_grad


def _globals() -> list[Any]:
    return [getattr(_module_globals, name) for name in GLOBAL_HOOKS]


# Immutable: what is in them is looked at by itself.
_FIXED = frozenset({tuple, frozenset, torch.Size})


def _items(value: Any) -> list[Any]:
    """Give the class of an object, its namespace, and identities of what has no version."""
    if isinstance(value, DATA):
        return [freeze_data(value)]
    space = getattr(value, "__dict__", None)
    return [type(value), id(space), *map(id, _unversioned(value))]


def _unversioned(value: Any) -> list[Any]:
    """Give what is in a value and in no dict that has a version."""
    if type(value) in EXACT:
        # Of an ordered dict the keys: its version does not tell when one is moved to the end.
        return list(value)
    slots = slots_of(value)
    if isinstance(value, (*CONTAINERS, functools.partial, types.MethodType)):
        return [*slots, *values_in(value)]
    return slots


def _reached(modules: list[nn.Module], others: list[Any]) -> Iterator[Any]:
    """Walk what a key looks into: tensors, containers and objects in namespaces, nested."""
    spaces = [vars(module) for module in modules]
    seen = {id(value) for space in spaces for name, value in space.items() if is_apart(name)}
    seen.update(map(id, modules))
    pending: deque[tuple[Any, int]] = deque((space, -1) for space in spaces)
    pending += [(value, 0) for value in others]
    while pending:
        value, depth = pending.popleft()
        # Most of what there is are names.
        if type(value) is str or id(value) in seen:
            continue
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, DATA):
            seen.add(id(value))
            yield value
        elif depth < 0 or is_nested(value, depth):
            seen.add(id(value))
            yield value
            below = depth_in(value, depth)
            pending += [(inner, below) for inner in values_in(value)]
