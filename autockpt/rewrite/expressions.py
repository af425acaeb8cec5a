"""Nodes of a captured graph as Python expressions that a person can read."""

from __future__ import annotations

import ast
import enum
import functools
import keyword
import operator
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from autockpt.rewrite.names import unique

INFIX: dict[str, str] = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "true_divide": "/", "matmul": "@",
    "__add__": "+", "__sub__": "-", "__mul__": "*", "__truediv__": "/", "__matmul__": "@",
    "__pow__": "**", "__floordiv__": "//", "__mod__": "%", "__lshift__": "<<",
    "__rshift__": ">>", "__and__": "&", "__or__": "|", "__xor__": "^",
    "__eq__": "==", "__ne__": "!=", "__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">=",
}  # fmt: skip
_OPERATORS: dict[Any, str] = {
    operator.getitem: "__getitem__",
    operator.setitem: "__setitem__",
    operator.invert: "__invert__",
    operator.neg: "__neg__",
    **{getattr(operator, name): name for name in INFIX if name.startswith("__")},
}
PREFIX: dict[str, str] = {"neg": "-", "__neg__": "-", "__invert__": "~"}
_MISSING = object()
_PLAIN = (bool, int, float, str, type(None))
_LISTS = (nn.Sequential, nn.ModuleList, nn.ParameterList)
# One step of a target: an attribute, or an item of a container in an attribute.
_STEP = re.compile(r"\.?(?P<name>[^.\[\]]+)|\[(?P<key>-?\d+|'[^']*')\]")
_LITERALS = (bool, int, str, bytes, type(None), type(Ellipsis), complex)
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


class Renderer:
    """Renders nodes, and collects the globals that the rendered code needs.

    Parameters
    ----------
    root : nn.Module or None
        The module whose forward is rendered: tells lists of modules from attributes.
    namespace : dict
        The globals of the emitted code. Objects that have no importable name are bound here.
    """

    def __init__(self, root: nn.Module | None, namespace: dict[str, Any]) -> None:
        self._root = root
        self.namespace = namespace
        self.names: dict[fx.Node, str] = {}
        self.taken: set[str] = {"self", *namespace}
        self._variables: dict[str, str] = {}
        self._bound = {id(value): name for name, value in namespace.items()}

    def declare(self, node: fx.Node) -> str:
        """Give the variable of ``node`` its name."""
        name = self.names[node] = unique(node.name, self.taken)
        return name

    def variable(self, owner: str) -> str:
        """Give a module of that path a variable: the same for all of the same last name.

        Examples
        --------
        >>> renderer = Renderer(None, {})
        >>> [renderer.variable(path) for path in ("h.0.norm", "h.1.norm", "h.2", "2")]
        ['norm', 'norm', 'h_2', 'layer_2']
        """
        *above, last = owner.split(".")
        name = last if last.isidentifier() else "_".join([*(above[-1:] or ["layer"]), last])
        if name not in self._variables:
            self._variables[name] = unique(name, self.taken)
        return self._variables[name]

    def layer_variable(self, layer: str) -> str:
        """Give an item of a list of modules a variable: the same for all items of such a list.

        Examples
        --------
        >>> renderer = Renderer(None, {})
        >>> paths = "stages.0.layers.1", "stages.1.layers.0", "stages.0", "h.7", "4"
        >>> [renderer.layer_variable(path) for path in paths]
        ['layer', 'layer', 'stage', 'h', 'layer_2']
        """
        containers = [part for part in layer.split(".")[:-1] if not part.isdigit()]
        key = ".".join([*containers, "*"])
        if key not in self._variables:
            name = containers[-1] if containers else "layer"
            self._variables[key] = unique(name.removesuffix("s") or name, self.taken)
        return self._variables[key]

    def call(self, node: fx.Node, wrapped: Mapping[fx.Node, str]) -> str:
        """Render the call of ``node``; ``wrapped`` overrides how an argument is rendered."""
        return self.call_of(node.target, node.args, node.kwargs, wrapped)

    def call_of(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        wrapped: Mapping[fx.Node, str],
    ) -> str:
        """Render the call of a function, as an operator where it is one, or of a method's name."""
        texts = [self.value(arg, wrapped) for arg in args]
        keywords = {
            key: self.value(arg, wrapped)
            for key, arg in kwargs.items()
            if not _is_default(target, key, arg)
        }
        if isinstance(target, str):
            return _method(target, texts, keywords)
        if target in _OPERATORS and not keywords:
            return _method(_OPERATORS[target], texts, keywords)
        if target is getattr and len(args) == 2:
            return f"{texts[0]}.{args[1]}"
        if target is setattr:
            return f"{texts[0]}.{args[1]} = {texts[2]}"
        return f"{self.function(target)}({_arguments(texts, keywords)})"

    def value(self, value: Any, wrapped: Mapping[fx.Node, str]) -> str:
        """Render an argument: a node, a constant, or a nest of both."""
        if isinstance(value, fx.Node):
            return wrapped.get(value) or self.reference(value)
        if isinstance(value, slice):
            return self._slice(value, wrapped)
        if isinstance(value, tuple | list | dict):
            return self._nest(value, wrapped)
        return self._constant(value)

    def reference(self, node: fx.Node) -> str:
        """Render the use of a node: its variable, or the path from the live module."""
        name = self.names.get(node)
        return name if name is not None else self.path(str(node.target))

    def path(self, target: str, known: tuple[Sequence[str], str] | None = None) -> str:
        """Render an attribute path from ``self``, or from a variable that holds a part of it.

        Examples
        --------
        >>> renderer = Renderer(nn.Sequential(nn.Linear(1, 1)), {})
        >>> renderer.path("0.weight"), renderer.path("0.weight", (["0"], "layer"))
        ('self[0].weight', 'layer.weight')
        >>> Renderer(None, {}).path("h.0.weight")
        "getattr(self.h, '0').weight"
        """
        text, owner = "self", self._root
        if known is not None:
            parts, text = known
            target = target[len(".".join(parts)) :]
            for part in parts:
                owner = getattr(owner, part, None)
        for match in _STEP.finditer(target):
            if match["key"] is not None:
                # An item of a container in a plain attribute.
                text, owner = f"{text}[{match['key']}]", None
                continue
            part = match["name"]
            text = _access(text, owner, part)
            owner = getattr(owner, part, None)
        return text

    def layers(self, path: str) -> list[str]:
        """Give the items of lists of modules on the way to a module, outer ones first.

        Examples
        --------
        >>> stages = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
        >>> Renderer(stages, {}).layers("0.0")
        ['0', '0.0']
        """
        found, owner = [], self._root
        parts = path.split(".")
        for count, part in enumerate(parts, 1):
            if isinstance(_item(owner, part), int):
                found.append(".".join(parts[:count]))
            owner = getattr(owner, part, None)
        return found

    def function(self, function: Any) -> str:
        """Render a function by a dotted name that leads to it, or bind it in the globals."""
        if id(function) in self._bound:
            return self._bound[id(function)]
        dotted = _dotted(function)
        if dotted is not None and self._import(dotted.partition(".")[0]):
            return dotted
        owner = getattr(function, "__self__", None)
        if isinstance(owner, type) and getattr(function, "__name__", "") == "apply":
            return f"{self.bind(owner, owner.__name__)}.apply"
        return self.bind(function, getattr(function, "__name__", "function"))

    def bind(self, value: Any, name: str) -> str:
        """Bind an object in the globals, once, and give the name."""
        if id(value) not in self._bound:
            # The namespace keeps the object alive, so its id stays its own.
            bound = self._bound[id(value)] = unique(name, self.taken)
            self.namespace[bound] = value
        return self._bound[id(value)]

    def _import(self, package: str) -> bool:
        if package not in self.namespace:
            if package in self.taken:
                return False
            self.taken.add(package)
            self.namespace[package] = sys.modules[package]
        return True

    def _slice(self, value: slice, wrapped: Mapping[fx.Node, str]) -> str:
        return f"slice({', '.join(self.value(v, wrapped) for v in _bounds(value))})"

    def _nest(self, value: Any, wrapped: Mapping[fx.Node, str]) -> str:
        if isinstance(value, dict):
            pairs = (
                f"{self._constant(key)}: {self.value(item, wrapped)}" for key, item in value.items()
            )
            return "{" + ", ".join(pairs) + "}"
        items = [self.value(item, wrapped) for item in value]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        inside = ", ".join(items) + ("," if len(items) == 1 else "")
        if hasattr(value, "_fields"):
            return f"{self.bind(type(value), type(value).__name__)}({inside})"
        return f"({inside})"

    def _constant(self, value: Any) -> str:
        if isinstance(value, enum.Enum):
            return f"{self.bind(type(value), type(value).__name__)}[{value.name!r}]"
        if type(value) is float:
            return repr(value) if re.match(r"-?\d", repr(value)) else f"float({repr(value)!r})"
        if type(value) in _LITERALS or isinstance(value, _TORCH_CONSTANTS):
            return "..." if value is Ellipsis else repr(value)
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        return self.bind(value, f"constant_{type(value).__name__}")


def _access(text: str, owner: Any, part: str) -> str:
    """Render the access to one attribute of a live module."""
    key = _item(owner, part)
    if key is not None:
        return f"{text}[{key!r}]"
    if part.isidentifier() and part not in keyword.kwlist:
        return f"{text}.{part}"
    return f"getattr({text}, {part!r})"


def _item(owner: Any, part: str) -> int | str | None:
    """Give the key under which a container has a member, if it has it under the obvious one.

    Examples
    --------
    >>> layers = nn.Sequential(*[nn.Linear(1, 1) for _ in range(4)])
    >>> _item(layers, "2"), _item(layers[2:], "2"), _item(nn.ModuleDict({"a": layers}), "a")
    (2, None, 'a')
    """
    key: int | str
    if isinstance(owner, _LISTS) and part.isdigit():
        key = int(part)
    elif isinstance(owner, nn.ModuleDict | nn.ParameterDict):
        key = part
    else:
        return None
    try:
        # A slice keeps the names of its members, and a subclass may mean something else by a key.
        return key if owner[key] is getattr(owner, part) else None
    except (AttributeError, LookupError, TypeError):
        return None


def _is_default(function: Any, name: str, value: Any) -> bool:
    """Tell whether an argument says what the function assumes anyway."""
    if isinstance(value, fx.Node) or not isinstance(function, types.FunctionType):
        return False
    default = (function.__kwdefaults__ or {}).get(name, _defaults(function).get(name, _MISSING))
    return type(value) is type(default) and type(value) in _PLAIN and value == default


@functools.cache
def _defaults(function: types.FunctionType) -> dict[str, Any]:
    values = function.__defaults__ or ()
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    return dict(zip(names[len(names) - len(values) :], values, strict=True))


def in_parentheses(text: str) -> str:
    """Put an expression in parentheses if an index after it would not be one of the whole.

    Examples
    --------
    >>> in_parentheses("x * float('inf')"), in_parentheses("f(x)")
    ("(x * float('inf'))", 'f(x)')
    """
    tight = ast.Call, ast.Attribute, ast.Subscript, ast.Name
    return text if isinstance(ast.parse(text, mode="eval").body, tight) else f"({text})"


def _bounds(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def _method(name: str, args: list[str], keywords: dict[str, str]) -> str:
    receiver, rest = args[0], args[1:]
    if name == "__getitem__" and len(rest) == 1:
        return f"{receiver}[{_index(rest[0])}]"
    if name == "__setitem__" and len(rest) == 2:
        return f"{receiver}[{_index(rest[0])}] = {rest[1]}"
    if name in INFIX and len(rest) == 1 and not keywords:
        left = f"({receiver})" if receiver.startswith("-") else receiver
        return f"{left} {INFIX[name]} {rest[0]}"
    if name in PREFIX and not rest and not keywords:
        return f"{PREFIX[name]}{receiver}"
    return f"{receiver}.{name}({_arguments(rest, keywords)})"


def _index(text: str) -> str:
    """Drop the parentheses of an index that is a tuple, and write slices with colons.

    Examples
    --------
    >>> _index("(..., slice(None, 3, None))")
    '..., :3'
    """
    if text.startswith("(") and text.endswith(")") and len(text) > 2:
        text = text[1:-1]
    atom = r"(-?\w+)"
    return re.sub(rf"slice\({atom}, {atom}, {atom}\)", _colons, text)


def _colons(match: re.Match[str]) -> str:
    start, stop, step = ("" if part == "None" else part for part in match.groups())
    return f"{start}:{stop}" + (f":{step}" if step else "")


def _arguments(args: list[str], keywords: Mapping[str, str]) -> str:
    return ", ".join([*args, *(f"{key}={text}" for key, text in keywords.items())])


@functools.cache
def _known() -> dict[Callable[..., Any], str]:
    """Functions by the name a reader would expect, the most usual module first."""
    modules = {
        "F": torch.nn.functional,
        "torch": torch,
        "torch.special": torch.special,
        "torch.linalg": torch.linalg,
        "torch.fft": torch.fft,
        "torch.nn.init": torch.nn.init,
        "operator": operator,
    }
    known: dict[Callable[..., Any], str] = {}
    for prefix, module in modules.items():
        for name, function in vars(module).items():
            if callable(function) and not name.startswith("_") and _hashable(function):
                known.setdefault(function, f"{prefix}.{name}")
    return known


def _hashable(value: Any) -> bool:
    return type(value).__hash__ is not None


def _dotted(function: Any) -> str | None:
    if _hashable(function) and function in _known():
        return _known()[function]
    if isinstance(function, torch._ops.OpOverload):
        return f"torch.ops.{function}"
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name:
        return None
    dotted = f"{module}.{name}"
    found: Any = sys.modules.get(module.partition(".")[0])
    for part in dotted.split(".")[1:]:
        found = getattr(found, part, None)
    return dotted if found is function and module != "__main__" else None
