"""The quick half of a key: whether everything in a model's namespaces is still the same object."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules import module as _module_globals

from autockpt.capture.freeze import layout_of
from autockpt.capture.paths import OURS, fields_of, is_atom

GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class _Space:
    """The values of a namespace or container: identities, layouts of tensors, what is nested."""

    ids: list[int]
    tensors: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)
    nested: list[tuple[int, type, _Space]] = field(default_factory=list)

    def holds(self, values: list[Any]) -> bool:
        if list(map(id, values)) != self.ids:
            return False
        for index, layout in self.tensors:
            if layout_of(values[index]) != layout:
                return False
        for index, cls, space in self.nested:
            value = values[index]
            if type(value) is not cls or not space.holds(_values_in(value)):
                return False
        return True


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
        self._seen: set[int] = set()
        self._root = weakref.ref(model)
        self._modules = [
            (weakref.ref(module), type(module), self._space(_namespace(module), 0))
            for module in model.modules()
        ]
        self._global = self._space(_global_hooks(), 0)

    def holds(self, model: torch.nn.Module) -> bool:
        """Whether nothing was replaced; False where that is not known."""
        if self._gone or model is not self._root() or any(self._empty):
            return False
        for reference, cls, space in self._modules:
            module = reference()
            if type(module) is not cls or not space.holds(_namespace(module)):
                return False
        return self._global.holds(_global_hooks())

    def _space(self, values: Sequence[Any], depth: int) -> _Space:
        space = _Space(list(map(id, values)))
        for index, value in enumerate(values):
            self._hold(value)
            if isinstance(value, torch.Tensor):
                space.tensors.append((index, layout_of(value)))
            elif self._is_nested(value, depth):
                self._seen.add(id(value))
                inner = _values_in(value)
                if inner:
                    deeper = depth if isinstance(value, _CONTAINERS) else max(depth, 1)
                    inside = self._space(inner, deeper + 1)
                    space.nested.append((index, type(value), inside))
                elif isinstance(value, _CONTAINERS):
                    self._empty.append(value)
        return space

    def _is_nested(self, value: Any, depth: int) -> bool:
        if id(value) in self._seen or depth > _MAX_DEPTH:
            return False
        # As a key does: other objects count one level deep.
        return isinstance(value, _CONTAINERS) or (depth <= 1 and not is_atom(value))

    def _hold(self, value: Any) -> None:
        if id(value) in self._held or isinstance(value, _CONTAINERS):
            return
        try:
            self._held[id(value)] = weakref.ref(value, self._gone.append)
        except TypeError:
            self._held[id(value)] = value


_CONTAINERS = (dict, list, tuple, deque, set, frozenset)


def _values_in(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(dict.values(value))
    if isinstance(value, _CONTAINERS):
        return list(value)
    space = getattr(value, "__dict__", None)
    return list((space if isinstance(space, dict) else fields_of(value)).values())


def _namespace(module: torch.nn.Module) -> list[Any]:
    space = vars(module)
    if OURS.isdisjoint(space):
        return list(space.values())
    return [value for name, value in space.items() if name not in OURS]


def _global_hooks() -> list[Any]:
    return [getattr(_module_globals, name) for name in GLOBAL_HOOKS]
