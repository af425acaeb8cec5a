"""A module that is new throughout and holds the very same parameters and buffers."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any, TypeVar

import torch

from autockpt.errors import CaptureError

M = TypeVar("M", bound=torch.nn.Module)

# Subclasses may forbid writing (diffusers' FrozenDict); like any other object they are shared.
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)


def clone_module(model: M) -> M:
    """Copy every module object of a model; share every tensor.

    Parameters
    ----------
    model : torch.nn.Module

    Returns
    -------
    torch.nn.Module
        Of the same class, with the same attributes in the same order. Parameters and buffers
        are the same objects; hook tables are copied; lists, dicts, tuples, sets and deques in
        attributes are rebuilt; bound methods, partials, closures and weak references of copied
        modules lead to the copies; a submodule that is used twice is copied once. Any other
        object is shared.

    Raises
    ------
    CaptureError
        For scripted or compiled modules, whose code is tied to the object it was made for.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> other = clone_module(model)
    >>> other[0] is model[0], other[0].weight is model[0].weight
    (False, True)
    """
    for name, module in model.named_modules():
        refuse_compiled(name, module)
    clone: M = _Cloner(model).clone(model)
    return clone


def refuse_compiled(name: str, module: torch.nn.Module) -> None:
    """Raise a `CaptureError` if a module is scripted or compiled."""
    kind = ""
    if isinstance(module, torch.jit.ScriptModule):
        kind = "scripted (torch.jit)"
    elif hasattr(module, "_orig_mod") or vars(module).get("_compiled_call_impl") is not None:
        kind = "compiled (torch.compile)"
    if kind:
        raise CaptureError(
            f"Module '{name or type(module).__name__}' is {kind}: its calls cannot be seen. "
            "Pass the plain module; compile the optimized model afterwards."
        )


class _Cloner:
    def __init__(self, model: torch.nn.Module) -> None:
        self._made: dict[int, Any] = {}
        self._ours = {id(module) for module in model.modules()}

    def clone(self, value: Any) -> Any:
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, torch.nn.Module):
            return self._module(value)
        if type(value) in _CONTAINERS:
            return self._container(value)
        if isinstance(value, tuple):
            return self._tuple(value)
        return self._callable(value)

    def _module(self, module: torch.nn.Module) -> torch.nn.Module:
        fresh: torch.nn.Module = object.__new__(type(module))
        self._made[id(module)] = fresh
        # Not through __setattr__: the tables are copied as they are, in their order.
        for name, value in vars(module).items():
            fresh.__dict__[name] = self.clone(value)
        return fresh

    def _follow(self, module: Any) -> Any:
        # A method or reference may lead to a module outside the model, which stays.
        ours = id(module) in self._ours or id(module) in self._made
        return self.clone(module) if ours else module

    def _container(self, value: Any) -> Any:
        # `copy` keeps what belongs to the type (a default factory, a maximal length).
        fresh = copy.copy(value)
        self._made[id(value)] = fresh
        fresh.clear()
        if isinstance(value, dict):
            for key, item in value.items():
                fresh[key] = self.clone(item)
        elif isinstance(value, set):
            fresh.update(map(self.clone, value))
        else:
            fresh.extend(map(self.clone, value))
        return fresh

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        items = [self.clone(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)

    def _callable(self, value: Any) -> Any:
        if isinstance(value, types.MethodType):
            owner = self._follow(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            args = self.clone(value.args)
            function = self.clone(value.func)
            return functools.partial(function, *args, **self.clone(value.keywords))
        if isinstance(value, types.FunctionType) and value.__closure__:
            return self._closure(value)
        if isinstance(value, weakref.ref) and isinstance(value(), torch.nn.Module):
            return weakref.ref(self._follow(value()))
        return value

    def _closure(self, function: types.FunctionType) -> Any:
        """Follow what a wrapper put around a module's method closes over."""
        # A function may close over itself; it stays as it is there.
        self._made[id(function)] = function
        cells = function.__closure__ or ()
        contents = [self._content(cell) for cell in cells]
        if all(new is old for new, old in zip(contents, map(_content_of, cells), strict=True)):
            return function
        fresh = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(map(types.CellType, contents)),
        )
        fresh.__kwdefaults__ = function.__kwdefaults__
        vars(fresh).update({name: self.clone(value) for name, value in vars(function).items()})
        self._made[id(function)] = fresh
        return functools.update_wrapper(fresh, function, updated=())

    def _content(self, cell: types.CellType) -> Any:
        content = _content_of(cell)
        if isinstance(content, torch.nn.Module):
            return self._follow(content)
        # State that a wrapper shares with others is not taken apart.
        return content if type(content) in _CONTAINERS else self.clone(content)


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
