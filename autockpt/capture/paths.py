"""Paths to values: inside ``(args, kwargs)``, and from a root module to a tensor."""

from __future__ import annotations

import array
import dataclasses
import functools
import re
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

Step = tuple[Literal["item", "attr"], Any]

_STEP = re.compile(r"\.?(?P<name>[^.\[\]]+)|\[(?P<key>-?\d+|'[^']*')\]")
_MAX_DEPTH = 8
_UNSET = object()

CONTAINERS = (dict, list, tuple, deque, set, frozenset)
# These hold nothing but their items; what derives from them may have attributes beside those.
EXACT = frozenset({*CONTAINERS, OrderedDict, torch.Size})
# Written in place without anyone noticing.
DATA = (np.ndarray, bytearray, array.array)

# Called, and without a state of its own; of the last two a key looks at what they are bound to.
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.MethodType,
    functools.partial,
)
# Callables of torch's machinery and compiled kernels: what they hold is caches, filled by a call.
_MACHINERY = ("torch._", "torch.jit", "torch.library", "triton")

# What the library hangs on an optimized root; it says nothing about the forward.
OURS = frozenset({"autockpt"})

# What torch's composable APIs (fully_shard) hang on a module: state of theirs, not of the model.
_COMPOSABLE = "__composable_api_state_key"

# Marks of torch.compile, the last one where Lightning was imported, which notes what
# ``module.compile`` was given: what is compiled is the same forward.
_COMPILED = frozenset({"_compiled_call_impl", "_is_torch_compile", "_compile_kwargs"})


def is_apart(name: str) -> bool:
    """Whether an attribute of a module is no part of the model."""
    return name in OURS or name in _COMPILED or name.startswith(_COMPOSABLE)


def forward_of(model: torch.nn.Module) -> Callable[..., Any]:
    """Give the forward that is recorded.

    Of an optimized model it is the one of the class that the user wrote: an attribute
    ``forward`` of the object was put around ours (accelerate's autocast), and calls it.
    """
    original = getattr(type(model), "_autockpt_original", None)
    forward: Callable[..., Any] = (
        model.forward if original is None else original.forward.__get__(model)
    )
    return forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Where a value is found from a root object.

    Attributes
    ----------
    root : str
        A parameter of ``forward`` by name; an extra positional argument is ``*0``, ``*1``, ...
    steps : tuple of (kind, key)
        ``("item", key)`` is ``value[key]``, ``("attr", name)`` is ``value.name``.
    """

    root: str
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return self.root + format_steps(self.steps)


def format_steps(steps: tuple[Step, ...]) -> str:
    """Python source of the accesses: ``.layers[0].keys``."""
    return "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in steps)


def follow(value: Any, steps: tuple[Step, ...]) -> Any:
    """Return what `steps` lead to from `value`."""
    for kind, key in steps:
        value = getattr(value, key) if kind == "attr" else value[key]
    return value


def read_path(root: torch.nn.Module, target: str) -> Any:
    """Read the target of a ``get_attr`` node from the live module.

    Parameters
    ----------
    root : torch.nn.Module
        The model.
    target : str
        ``transformer.h.0.attn.bias``; tensors in plain containers are ``cache.table[0]`` or
        ``cache.table['k']``.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    >>> read_path(model, "0.bias").shape
    torch.Size([3])
    """
    value: Any = root
    for match in _STEP.finditer(target):
        if (name := match["name"]) is not None:
            value = getattr(value, name)
        else:
            key = match["key"]
            value = value[key[1:-1] if key.startswith("'") else int(key)]
    return value


def tensors_within(value: Any, *, objects: bool) -> Iterator[tuple[tuple[Step, ...], torch.Tensor]]:
    """Walk the tensors in nested containers, in a stable order.

    Parameters
    ----------
    value : object
        A tensor, container or object.
    objects : bool
        Whether to look into the attributes of objects that are no containers as well.

    Yields
    ------
    (steps, tensor)
    """
    for steps, leaf in _walk(value, (), objects, set()):
        if isinstance(leaf, torch.Tensor):
            yield steps, leaf


def generators_within(value: Any) -> Iterator[torch.Generator]:
    """Walk the generators of random numbers in nested containers and objects."""
    for _, leaf in _walk(value, (), True, set()):
        if isinstance(leaf, torch.Generator):
            yield leaf


def _walk(
    value: Any, steps: tuple[Step, ...], objects: bool, seen: set[int]
) -> Iterator[tuple[tuple[Step, ...], Any]]:
    if isinstance(value, torch.Tensor) or issubclass(type(value), torch.Generator):
        yield steps, value
        return
    if len(steps) > _MAX_DEPTH or id(value) in seen:
        return
    for step, child in children(value, objects=objects):
        yield from _walk(child, (*steps, step), objects, seen | {id(value)})


def children(value: Any, *, objects: bool) -> list[tuple[Step, Any]]:
    """Items of a container and, on demand, attributes of a plain object."""
    if isinstance(value, Mapping):
        found: list[tuple[Step, Any]] = [(("item", key), item) for key, item in value.items()]
        return found
    if isinstance(value, (list, tuple)):
        return [(("item", index), item) for index, item in enumerate(value)]
    if objects and not is_atom(value):
        return [(("attr", name), item) for name, item in fields_of(value).items()]
    return []


def is_atom(value: object) -> bool:
    """Whether a value is never looked into."""
    if value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, type, torch.nn.Module, torch.dtype)
    ):
        return True
    # Not isinstance: these classes answer that in Python, and most of what is asked about is
    # neither.
    cls = type(value)
    if issubclass(cls, (torch.device, torch.Generator, *_FUNCTIONS)):
        return True
    return callable(value) and str(cls.__module__).startswith(_MACHINERY)


def fields_of(value: Any) -> dict[str, Any]:
    """Instance attributes of an object, with or without ``__slots__``."""
    space = getattr(value, "__dict__", None)
    found: dict[str, Any] = dict(space) if isinstance(space, dict) else {}
    for name in _declared(type(value))[0]:
        if name not in found and hasattr(value, name):
            found[name] = getattr(value, name)
    return found


def slots_of(value: Any) -> list[Any]:
    """Give the values of attributes that are in no namespace, with a mark where one is not set."""
    return [getattr(value, name, _UNSET) for name in _declared(type(value))[1]]


def items_of(value: Any) -> list[Any]:
    """Items of a container, of a dict first the keys, whatever its class makes of iteration."""
    kind: Any = type(value)
    if kind not in EXACT:
        kind = next(k for k in (OrderedDict, *CONTAINERS) if isinstance(value, k))
    items = list(kind.__iter__(value))
    return (
        [*items, *(dict.__getitem__(value, k) for k in items)] if issubclass(kind, dict) else items
    )


_Names = tuple[str, ...]
_DECLARED: weakref.WeakKeyDictionary[type, tuple[_Names, _Names]] = weakref.WeakKeyDictionary()


def _declared(cls: type) -> tuple[_Names, _Names]:
    """Names of the fields and slots that a class declares, and of the slots alone."""
    if (known := _DECLARED.get(cls)) is not None:
        return known
    slots: list[str] = []
    for base in cls.__mro__:
        declared = base.__dict__.get("__slots__", ())
        for name in (declared,) if isinstance(declared, str) else declared:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{base.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__"):
                slots.append(name)
    fields = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    found = tuple(dict.fromkeys((*fields, *slots))), tuple(slots)
    _DECLARED[cls] = found
    return found
