"""The quick half of a key: whether everything in a model's namespaces is still the same object."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules import module as _module_globals

from autockpt.capture.freeze import freeze_data, parts_of
from autockpt.capture.paths import (
    CONTAINERS,
    DATA,
    EXACT,
    fields_of,
    is_apart,
    is_atom,
    items_of,
)

GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_MAX_DEPTH = 8


class _Level:
    """Values side by side: identities, layouts of tensors, and which of them are looked into.

    All namespaces of a model are one level, what is in their containers is the next: comparing
    is then a few passes in C over long lists.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.tensors: list[int] = []
        self.layouts: _Layouts = ([], [], [], [], [], [])
        self.nested: list[int] = []
        self.classes: list[type] = []
        self.arrays: list[int] = []
        self.data: list[Any] = []

    def holds(self, values: list[Any]) -> bool:
        if list(map(id, values)) != self.ids:
            return False
        # An identity is that of another object if a container died and one was made in its place.
        if [type(values[index]) for index in self.nested] != self.classes:
            return False
        if _layouts([values[index] for index in self.tensors]) != self.layouts:
            return False
        return not self.arrays or [freeze_data(values[i]) for i in self.arrays] == self.data

    def next(self, values: list[Any]) -> list[Any]:
        inside: list[Any] = []
        for index in self.nested:
            value = values[index]
            inside += (*value, *value.values()) if type(value) in _DICTS else values_in(value)
        return inside


class Snapshot:
    """Identities of everything in the namespaces of a model, compared at C speed.

    Notes
    -----
    Holds no tensor and no module: a step that is not run again must not keep alive what was
    replaced since. An identity is good as long as its object lives. Plain values are held,
    containers are compared by what is in them, and for all other objects a weak reference
    tells when one is gone, which ends the snapshot.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._held = Held()
        self._empty: list[Any] = []
        self._root = weakref.ref(model)
        modules = list(model.modules())
        self._modules = list(map(weakref.ref, modules))
        self._classes = list(map(type, modules))
        self._levels: list[_Level] = []
        spaces = [vars(module).items() for module in modules]
        seen = {id(value) for space in spaces for name, value in space if is_apart(name)}
        seen.update(map(id, modules))
        values = _namespaces(modules)
        depths = [0] * len(values)
        while values:
            values, depths = self._level(values, depths, seen)

    def holds(self, model: torch.nn.Module) -> bool:
        """Whether nothing was replaced; False where that is not known."""
        if self._held.gone or model is not self._root() or any(self._empty):
            return False
        modules: Any = [reference() for reference in self._modules]
        if list(map(type, modules)) != self._classes:
            return False
        values = _namespaces(modules)
        for level in self._levels:
            if not level.holds(values):
                return False
            values = level.next(values)
        return True

    def _level(
        self, values: list[Any], depths: list[int], seen: set[int]
    ) -> tuple[list[Any], list[int]]:
        level = _Level()
        level.ids = list(map(id, values))
        below: list[int] = []
        for index, (value, depth) in enumerate(zip(values, depths, strict=True)):
            if not isinstance(value, CONTAINERS):
                self._held.add(value)
            if type(value) is str:
                # Most of what there is are names.
                continue
            if isinstance(value, torch.Tensor):
                level.tensors.append(index)
            elif isinstance(value, DATA):
                level.arrays.append(index)
            elif id(value) not in seen and is_nested(value, depth):
                seen.add(id(value))
                # Of these classes truth is asked in C, and there is nothing but items.
                if type(value) in EXACT and not value:
                    self._empty.append(value)
                else:
                    level.nested.append(index)
                    below += [depth_in(value, depth)] * len(values_in(value))
        level.classes = [type(values[index]) for index in level.nested]
        level.layouts = _layouts([values[index] for index in level.tensors])
        level.data = [freeze_data(values[index]) for index in level.arrays]
        self._levels.append(level)
        return level.next(values), below


class Held:
    """Objects whose identities are good: plain values are kept, of others it is known if one went.

    Attributes
    ----------
    gone : list
        Not empty if an object is no more, whose address another one may have.
    """

    def __init__(self) -> None:
        self.gone: list[Any] = []
        self._held: dict[int, Any] = {}

    def add(self, value: Any) -> None:
        """Watch a value."""
        if id(value) in self._held:
            return
        try:
            self._held[id(value)] = weakref.ref(value, self.gone.append)
        except TypeError:
            self._held[id(value)] = value


def is_nested(value: Any, depth: int) -> bool:
    """Whether a key looks into a value, so far down."""
    if depth > _MAX_DEPTH:
        return False
    if isinstance(value, (*CONTAINERS, *_BOUND)):
        return True
    # As a key does: other objects count one level deep.
    return depth <= 1 and (isinstance(value, torch.nn.Module) or not is_atom(value))


def depth_in(value: Any, depth: int) -> int:
    """Give the depth of what is in a value, as a key counts it or less."""
    if isinstance(value, torch.nn.Module):
        return 1
    if isinstance(value, _BOUND):
        return depth
    return (depth if isinstance(value, CONTAINERS) else max(depth, 1)) + 1


_Layouts = tuple[list[Any], list[Any], list[Any], list[Any], list[Any], list[Any]]


def _layouts(tensors: list[torch.Tensor]) -> _Layouts:
    """What ``layout_of`` says of each."""
    layouts = [t.layout for t in tensors]
    return (
        [t.shape for t in tensors],
        [t.stride() if k is torch.strided else () for t, k in zip(tensors, layouts, strict=True)],
        [t.dtype for t in tensors],
        [t.device for t in tensors],
        [t.requires_grad for t in tensors],
        layouts,
    )


_BOUND = (types.MethodType, functools.partial)
_DICTS = (dict, OrderedDict)


def values_in(value: Any) -> list[Any]:
    """Give all that a key looks at in a value: keys and items, names and attributes."""
    if type(value) in EXACT:
        return items_of(value)
    if isinstance(value, torch.nn.Module):
        space = {name: item for name, item in vars(value).items() if not is_apart(name)}
        return [*space, *space.values(), *parts_of(value)]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    fields = fields_of(value)
    found = [*fields, *fields.values()]
    if isinstance(value, CONTAINERS):
        found += items_of(value)
    if isinstance(value, functools.partial):
        found += [value.func, value.args, value.keywords]
    return found


def _namespaces(modules: Sequence[torch.nn.Module]) -> list[Any]:
    """Give what hangs on the modules, and the tables of global hooks."""
    values: list[Any] = [getattr(_module_globals, name) for name in GLOBAL_HOOKS]
    for module in modules:
        space = module.__dict__
        values += space
        values += space.values()
    return values
