"""What python state a forward changed: attributes, containers, what it reaches outside."""

from __future__ import annotations

import dis
import inspect
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

from autockpt.capture.guards import same
from autockpt.capture.paths import fields_of, is_apart, is_atom

_OBJECT_DEPTH = 3
_MISSING = object()
_FUNCTIONS = (FunctionType, MethodType, partial)
_TABLES = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something that a forward wrote.

    Attributes
    ----------
    what : str
        For an error message.
    place : str
        The module or object and, where it is found in the code, the line that writes.
    now : object
        The new value, or the container that changed.
    module, name : str or None
        Of an attribute of a module: where it is.
    undo : callable
        Puts an attribute back.
    """

    what: str
    place: str
    now: Any
    module: str | None = None
    name: str = ""
    undo: Callable[[], None] = lambda: None

    @property
    def is_left(self) -> bool:
        """Whether this is a result that is left in an attribute, for whoever looks there."""
        found = list(self._leaves())
        return (
            self.module is not None
            and any(isinstance(leaf, torch.Tensor) for leaf in found)
            and all(isinstance(leaf, torch.Tensor) or _is_plain(leaf) for leaf in found)
        )

    def _leaves(self) -> Iterator[Any]:
        pending = [self.now]
        while pending:
            value = pending.pop()
            if type(value) in (list, tuple):
                pending += value
            elif type(value) is dict:
                pending += value.values()
            else:
                yield value

    def settles(self, constant: Callable[[torch.Tensor], bool]) -> bool:
        """Whether this may be something made once: a setting, hooks, or a cache of constants."""
        pending, depth = [self.now], 0
        while pending and depth < 1000:
            value, depth = pending.pop(), depth + 1
            if isinstance(value, torch.Tensor):
                if not constant(value):
                    return False
            elif isinstance(value, (list, tuple, deque, set)):
                pending += value
            elif isinstance(value, dict):
                pending += value.values()
            elif not (_is_plain(value) or isinstance(value, _FUNCTIONS)):
                return False
        return not pending


def _hooks_of(module: torch.nn.Module) -> list[Any]:
    """Forward hooks and pre-hooks of a module."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def _outside_of(function: Any) -> dict[str, Any]:
    """Containers that a function reaches by its closure or by globals, by name.

    A forward or a hook that appends to one of them would do so once, when it is recorded.
    """
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    found = {name: cell.cell_contents for name, cell in cells if _is_set(cell)}
    space = function.__globals__
    found.update({name: space[name] for name in code.co_names if name in space})
    kinds = (list, dict, set, deque)
    return {name: value for name, value in found.items() if type(value) in kinds}


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


class Watch:
    """Shallow copies of namespaces and containers, to compare with and to restore from."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._namespaces: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[str, Any, Any]] = []
        self._modules: dict[str, Any] = {}
        self._reached: dict[str, Any] = {}

    def add(self, where: str, owner: Any, namespace: dict[str, Any], depth: int = 0) -> None:
        """Look at a namespace and at what hangs on it."""
        self._seen[id(owner)] = owner
        self._namespaces.append((where, owner, namespace, dict(namespace)))
        for key, value in namespace.items():
            if is_apart(key):
                continue
            self.visit(f"{where}.{key}" if where else key, value, depth)

    def visit_modules(self, model: torch.nn.Module) -> None:
        """Look at all modules, and at what their forwards and hooks reach outside."""
        for name, module in model.named_modules():
            self.visit_module(name, module)

    def visit_module(self, name: str, module: torch.nn.Module) -> None:
        """Look at one module, its submodules apart."""
        self._modules[name] = module
        self.add(name, module, vars(module))
        for function in (module.forward, *_hooks_of(module)):
            for key, value in _outside_of(function).items():
                self._reached.setdefault(key, function)
                self.visit(key, value, 0)

    def visit(self, where: str, value: Any, depth: int) -> None:
        """Look at a container or object, nested ones too."""
        if is_atom(value) and not isinstance(value, (list, dict)):
            return
        if isinstance(value, torch.Tensor) or id(value) in self._seen or depth > 8:
            return
        self._seen[id(value)] = value
        items: Iterable[Any] = value if isinstance(value, tuple) else ()
        if isinstance(value, (list, deque, dict, set)):
            kind = next(k for k in (dict, set, list, deque) if isinstance(value, k))
            self._containers.append((where, value, kind(value)))
            items = list(value.values() if isinstance(value, dict) else value)
        for item in items:
            self.visit(where, item, depth + 1)
        if depth < _OBJECT_DEPTH:
            if isinstance(space := getattr(value, "__dict__", None), dict):
                self.add(where, value, space, depth + 1)
            else:
                for item in fields_of(value).values():
                    self.visit(where, item, depth + 1)

    def changes(self) -> Iterator[Change]:
        """Everything that is not as it was."""
        for where, owner, namespace, before in self._namespaces:
            for name in dict.fromkeys((*namespace, *before)):
                old, new = before.get(name, _MISSING), namespace.get(name, _MISSING)
                if not unchanged(new, old):
                    kind = type(owner).__name__
                    what = f"attribute '{name}' of {where!r} ({kind})" if where else f"'{name}'"
                    yield Change(
                        what=what,
                        place=writing_line(forward_of(owner), name),
                        now=new,
                        module=where if isinstance(owner, torch.nn.Module) else None,
                        name=name,
                        undo=partial(_set_back, namespace, name, old),
                    )
        for where, container, before in self._containers:
            if not _same_contents(container, before):
                what = f"the {type(container).__name__} '{where}'"
                owner, _, name = where.rpartition(".")
                if name in _TABLES:
                    name = _changed_key(container, before)
                    what = f"{_TABLES[where.rpartition('.')[2]]} '{name}' of '{owner}'"
                function = self._reached.get(where) or forward_of(self._modules.get(owner))
                yield Change(what=what, place=writing_line(function, name), now=container)

    def undo(self) -> None:
        """Put everything back."""
        for _, _, namespace, before in self._namespaces:
            if list(namespace) != list(before) or any(
                namespace[name] is not value for name, value in before.items()
            ):
                namespace.clear()
                namespace.update(before)
        for _, container, before in self._containers:
            if not _same_contents(container, before):
                container.clear()
                add = container.extend if isinstance(container, (list, deque)) else container.update
                add(before)


def _set_back(namespace: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        namespace.pop(name, None)
    else:
        namespace[name] = value


def _changed_key(table: dict[str, Any], before: dict[str, Any]) -> str:
    names = dict.fromkeys((*table, *before))
    changed = (n for n in names if table.get(n, _MISSING) is not before.get(n, _MISSING))
    return next(changed, "")


def _same_contents(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), before.items(), strict=True)
        return all(a[0] == b[0] and unchanged(a[1], b[1]) for a, b in pairs)
    if isinstance(container, set):
        return bool(container == before)
    return all(map(unchanged, container, before))


def unchanged(now: Any, before: Any) -> bool:
    """Whether a value is the same object, or an equal plain value."""
    return now is before or (_is_plain(now) and same(now, before))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    plain = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
    return value is None or isinstance(value, plain)


def writing_line(function: Any, name: str) -> str:
    """``file.py:line`` where a function writes an attribute or uses a name, as far as it shows."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    found = [i for i in dis.get_instructions(code) if i.argval == name and i.positions]
    stores = [i for i in found if i.opname.startswith(("STORE", "DELETE"))]
    lines = [i.positions.lineno for i in (*stores, *found) if i.positions is not None]
    return f"{os.path.basename(code.co_filename)}:{lines[0] if lines else code.co_firstlineno}"


def forward_of(owner: Any) -> Any:
    """Return the function that a module's class runs, or None."""
    return getattr(type(owner), "forward", None) if isinstance(owner, torch.nn.Module) else None
