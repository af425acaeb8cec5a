"""Values that compare by value: what a key remembers of attributes and arguments."""

from __future__ import annotations

import functools
import struct
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from autockpt.capture.guards import freeze_array
from autockpt.capture.paths import fields_of, is_atom


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
        Names of the modules that are known, by id; others compare by identity.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._indices: dict[int, int] = {}
        self._seen: set[int] = set()
        self.tensors: list[torch.Tensor] = []

    def value(self, value: Any, depth: int, deep: bool = False) -> Any:
        """Freeze a value; objects are looked into one level deep, or all the way if `deep`."""
        if isinstance(value, float):
            return ("float", struct.pack("<d", value))
        if value is None or isinstance(value, (bool, int, str, bytes, complex, type)):
            return (type(value), value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return freeze_array(np.asarray(value))
        if isinstance(value, torch.nn.Module):
            name = self._names.get(id(value))
            return ("module", name) if name is not None else _Is(value)
        if depth > 8 or id(value) in self._seen:
            return type(value)
        if isinstance(value, (types.MethodType, functools.partial)):
            return self._callable(value, depth, deep)
        self._seen.add(id(value))
        try:
            return self._compound(value, depth, deep)
        finally:
            self._seen.discard(id(value))

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if id(tensor) not in self._indices:
            self._indices[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return ("tensor", self._indices[id(tensor)], layout_of(tensor))

    def _callable(self, value: Any, depth: int, deep: bool) -> Any:
        if isinstance(value, types.MethodType):
            return (value.__func__, self.value(value.__self__, depth + 1, deep))
        parts = (value.args, value.keywords)
        return (_Is(value.func), self.value(parts, depth + 1, deep))

    def _compound(self, value: Any, depth: int, deep: bool) -> Any:
        if isinstance(value, dict):
            items = tuple((k, self.value(v, depth + 1, deep)) for k, v in dict.items(value))
            return (type(value), items)
        if isinstance(value, (list, tuple, deque)):
            return (type(value), tuple(self.value(item, depth + 1, deep) for item in value))
        if isinstance(value, (set, frozenset)):
            return (type(value), frozenset(value))
        if is_atom(value) or not (deep or depth <= 1):
            return _Comparable(value)
        state = tuple(self._fields(value, depth, deep))
        return (type(value), state) if state else _Comparable(value)

    def _fields(self, value: Any, depth: int, deep: bool) -> Iterator[tuple[str, Any]]:
        for name, item in fields_of(value).items():
            yield name, self.value(item, max(depth, 1) + 1, deep)


class _Comparable(_Is):
    """Compares by identity, then by the value's own equality if that gives a bool."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Is):
            return False
        if other.value is self.value:
            return True
        return type(other.value) is type(self.value) and (other.value == self.value) is True

    __hash__ = _Is.__hash__
