"""Values that compare by value: what a key remembers of attributes and arguments."""

from __future__ import annotations

import functools
import struct
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from autockpt.capture.guards import freeze_array
from autockpt.capture.paths import (
    CONTAINERS,
    DATA,
    EXACT,
    fields_of,
    is_apart,
    is_atom,
    items_of,
)


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a graph takes for granted of a tensor: all but its values."""
    strided = tensor.layout is torch.strided
    return (
        tensor.shape,
        tensor.stride() if strided else (),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


def freeze_data(value: Any) -> tuple[Any, ...]:
    """Describe what an array holds."""
    if isinstance(value, np.ndarray):
        return (type(value), freeze_array(value))
    return (type(value), getattr(value, "typecode", ""), bytes(value))


class _Is:
    """Compares by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Freezer:
    """Turns values into ones that compare by value, without holding tensors.

    Parameters
    ----------
    names : mapping
        Names of the modules that are known, by id; others compare by identity and, where an
        object would be looked into, by what they hold.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._indices: dict[int, int] = {}
        self._seen: set[int] = set()
        self._hidden: set[int] = set()
        self.tensors: list[torch.Tensor] = []

    def value(self, value: Any, depth: int, deep: bool = False) -> Any:
        """Freeze a value; objects are looked into one level deep, or all the way if `deep`."""
        if isinstance(value, float):
            return ("float", struct.pack("<d", value))
        if value is None or isinstance(value, (bool, int, str, bytes, complex, type)):
            return (type(value), value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.generic):
            return freeze_array(np.asarray(value))
        if isinstance(value, DATA):
            return freeze_data(value)
        if isinstance(value, torch.nn.Module):
            return self._module(value, depth, deep)
        if depth > 8 or id(value) in self._seen:
            return type(value)
        self._seen.add(id(value))
        try:
            if isinstance(value, (types.MethodType, functools.partial)):
                return self._callable(value, depth, deep)
            return self._compound(value, depth, deep)
        finally:
            self._seen.discard(id(value))

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if id(tensor) not in self._indices:
            self._indices[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return ("tensor", self._indices[id(tensor)], layout_of(tensor))

    def _module(self, module: torch.nn.Module, depth: int, deep: bool) -> Any:
        name = self._names.get(id(module))
        if name is not None:
            return ("module", name)
        # In a list, say: no part of the model's tree, and yet its forward may run.
        if deep or depth > 1 or id(module) in self._hidden:
            return _Is(module)
        self._hidden.add(id(module))
        space = {k: self.value(v, 1) for k, v in vars(module).items() if not is_apart(k)}
        below = tuple(self._module(child, 1, False) for child in parts_of(module))
        return (_Is(module), type(module), space, below)

    def _callable(self, value: Any, depth: int, deep: bool) -> Any:
        if isinstance(value, types.MethodType):
            return (_Is(value.__func__), self.value(value.__self__, depth, deep))
        parts = (value.args, value.keywords)
        func = (_Is(value.func), self.value(value.func, depth, deep))
        return (*func, self.value(parts, depth + 1, deep), tuple(self._fields(value, depth, deep)))

    def _compound(self, value: Any, depth: int, deep: bool) -> Any:
        if isinstance(value, CONTAINERS):
            beside = () if type(value) in EXACT else tuple(self._fields(value, depth, deep))
            return (type(value), self._items(value, depth, deep), beside)
        if is_atom(value) or not (deep or depth <= 1):
            return _Comparable(value)
        state = tuple(self._fields(value, depth, deep))
        return (type(value), state) if state else _Comparable(value)

    def _items(self, value: Any, depth: int, deep: bool) -> Any:
        # Most hook tables are empty.
        if not (items := items_of(value)):
            return ()
        if isinstance(value, (set, frozenset)):
            return frozenset((type(item), item) for item in items)
        if not isinstance(value, dict):
            return tuple([self.value(item, depth + 1, deep) for item in items])
        count = len(items) // 2
        return tuple(
            (type(key), key, self.value(item, depth + 1, deep))
            for key, item in zip(items[:count], items[count:], strict=True)
        )

    def _fields(self, value: Any, depth: int, deep: bool) -> Iterator[tuple[str, Any]]:
        for name, item in fields_of(value).items():
            yield name, self.value(item, max(depth, 1) + 1, deep)


def parts_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Give the children of a module, of one that is half made too."""
    table = vars(module).get("_modules")
    found = table.values() if isinstance(table, dict) else ()
    return [child for child in found if isinstance(child, torch.nn.Module)]


class _Comparable(_Is):
    """Compares by identity, then by the value's own equality if that gives a bool."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Is):
            return False
        if other.value is self.value:
            return True
        try:
            return type(other.value) is type(self.value) and (other.value == self.value) is True
        except Exception:  # noqa: BLE001, whatever a user's class raises
            return False

    __hash__ = _Is.__hash__
