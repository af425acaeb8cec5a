"""The quick half of a key: whether everything in a model's namespaces is still the same object."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules import module as _module_globals

from autockpt.capture.paths import fields_of, is_apart, is_atom

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

    def holds(self, values: list[Any]) -> bool:
        if list(map(id, values)) != self.ids:
            return False
        # An identity is that of another object if a container died and one was made in its place.
        if [type(values[index]) for index in self.nested] != self.classes:
            return False
        return _layouts([values[index] for index in self.tensors]) == self.layouts

    def next(self, values: list[Any]) -> list[Any]:
        inside: list[Any] = []
        for index in self.nested:
            value = values[index]
            inside += value.values() if type(value) in _DICTS else values_in(value)
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
        self._gone: list[Any] = []
        self._held: dict[int, Any] = {}
        self._empty: list[Any] = []
        self._root = weakref.ref(model)
        modules = list(model.modules())
        self._modules = list(map(weakref.ref, modules))
        self._classes = list(map(type, modules))
        self._levels: list[_Level] = []
        spaces = [vars(module).items() for module in modules]
        seen = {id(value) for space in spaces for name, value in space if is_apart(name)}
        values = _namespaces(modules)
        depths = [0] * len(values)
        while values:
            values, depths = self._level(values, depths, seen)

    def holds(self, model: torch.nn.Module) -> bool:
        """Whether nothing was replaced; False where that is not known."""
        if self._gone or model is not self._root() or any(self._empty):
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
            self._hold(value)
            if isinstance(value, torch.Tensor):
                level.tensors.append(index)
            elif id(value) not in seen and is_nested(value, depth):
                seen.add(id(value))
                inner = values_in(value)
                if inner:
                    level.nested.append(index)
                    deeper = depth if isinstance(value, CONTAINERS) else max(depth, 1)
                    below += [deeper + 1] * len(inner)
                elif isinstance(value, CONTAINERS):
                    self._empty.append(value)
        level.classes = [type(values[index]) for index in level.nested]
        level.layouts = _layouts([values[index] for index in level.tensors])
        self._levels.append(level)
        return level.next(values), below

    def _hold(self, value: Any) -> None:
        if id(value) in self._held or isinstance(value, CONTAINERS):
            return
        try:
            self._held[id(value)] = weakref.ref(value, self._gone.append)
        except TypeError:
            self._held[id(value)] = value


def is_nested(value: Any, depth: int) -> bool:
    """Whether a key looks into a value, so far down."""
    if depth > _MAX_DEPTH:
        return False
    # As a key does: other objects count one level deep.
    return isinstance(value, CONTAINERS) or (depth <= 1 and not is_atom(value))


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


CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_DICTS = (dict, OrderedDict)


def values_in(value: Any) -> list[Any]:
    """Give the items of a container, the attributes of an object."""
    if isinstance(value, dict):
        return list(dict.values(value))
    if isinstance(value, CONTAINERS):
        return list(value)
    space = getattr(value, "__dict__", None)
    return list((space if isinstance(space, dict) else fields_of(value)).values())


def _namespaces(modules: Sequence[torch.nn.Module]) -> list[Any]:
    """Give what hangs on the modules, and the tables of global hooks."""
    values: list[Any] = [getattr(_module_globals, name) for name in GLOBAL_HOOKS]
    for module in modules:
        values += module.__dict__.values()
    return values
