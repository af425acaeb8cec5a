"""The tensors in a call's arguments, and the shape of its result."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autockpt.capture.paths import (
    CONTAINERS,
    Path,
    children,
    fields_of,
    follow,
    format_steps,
    is_atom,
    tensors_within,
)
from autockpt.errors import CaptureError


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """How a forward's arguments are named, whichever way they were passed."""

    names: tuple[str, ...]
    order: tuple[str, ...]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, forward: Callable[..., Any]) -> Binding:
        """Read a bound ``forward``'s signature."""
        kinds = inspect.Parameter
        names: list[str] = []
        order: list[str] = []
        defaults: dict[str, Any] = {}
        for name, parameter in inspect.signature(forward).parameters.items():
            if parameter.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
                order.append(name)
            if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD):
                names.append(name)
            if parameter.default is not kinds.empty:
                defaults[name] = parameter.default
        return cls(names=tuple(names), order=tuple(order), defaults=defaults)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Name every argument, in the same order however they are passed.

        Defaults are filled in; extra positional arguments are ``*0``, ``*1``, ...
        """
        given = {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}
        bound = {name: given.pop(name) for name in self.order if name in given}
        for index, value in enumerate(args[len(self.names) :]):
            bound[f"*{index}"] = value
        for name in sorted(given):
            bound[name] = given[name]
        return bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Finds the tensors of a graph's placeholders in ``(args, kwargs)``.

    Attributes
    ----------
    binding : Binding
        Names the arguments.
    paths : tuple of Path
        One for each placeholder, in order. Tensors in lists, tuples and dicts are all there;
        those in attributes of other objects only if the forward reads them.
    """

    binding: Binding
    paths: tuple[Path, ...]

    @classmethod
    def discover(
        cls, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Inputs:
        """Find the tensors that lie in the arguments' containers."""
        binding = Binding.of(forward)
        bound = binding.bind(args, kwargs)
        paths = tuple(
            Path(root=name, steps=steps)
            for name, value in bound.items()
            for steps, _ in tensors_within(value, objects=False)
        )
        return cls(binding=binding, paths=paths)

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Return the placeholders' tensors in this call.

        Raises
        ------
        KeyError, IndexError, AttributeError, TypeError
            If the arguments have another structure (which `Key` finds out first).
        """
        bound = self.binding.bind(args, kwargs)
        return tuple(follow(bound[path.root], path.steps) for path in self.paths)

    def sources(self, count: int, kwargs: Mapping[str, Any]) -> tuple[str, ...] | None:
        """Write what `tensors` reads as Python, for calls with `count` positional arguments.

        Returns
        -------
        tuple of str or None
            Expressions of ``args`` and ``kwargs``; None if a tensor is a default argument.
        """
        names = self.binding.names[:count]
        found = []
        for path in self.paths:
            if path.root in kwargs:
                root = f"kwargs[{path.root!r}]"
            elif path.root in names:
                root = f"args[{names.index(path.root)}]"
            elif path.root.startswith("*"):
                root = f"args[{len(self.binding.names) + int(path.root[1:])}]"
            else:
                return None
            found.append(root + format_steps(path.steps))
        return tuple(found)

    def locate(
        self, tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Path | None:
        """Find a tensor in the attributes of argument objects, or return None."""
        for name, value in self.binding.bind(args, kwargs).items():
            for steps, found in tensors_within(value, objects=True):
                if found is tensor:
                    return Path(root=name, steps=steps)
        return None


# Parts of a template. Each builds its value anew from the output tensors; `made` holds the
# containers that were built already, for objects that the output holds more than once.


@dataclass(frozen=True, slots=True)
class _Leaf:
    index: int

    def build(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        return tensors[self.index]


@dataclass(frozen=True, slots=True)
class _Constant:
    value: Any

    def build(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class _Again:
    slot: int

    def build(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        return made[self.slot]


@dataclass(frozen=True, slots=True)
class _Tuple:
    slot: int
    cls: type
    items: tuple[Any, ...]

    def build(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        items = [item.build(tensors, made) for item in self.items]
        if self.cls is tuple:
            value: Any = tuple(items)
        elif hasattr(self.cls, "_make"):
            value = self.cls._make(items)
        elif hasattr(self.cls, "n_sequence_fields"):
            value = self.cls(items)
        else:
            value = tuple.__new__(self.cls, items)
        made[self.slot] = value
        return value


@dataclass(frozen=True, slots=True)
class _Container:
    """Lists, dicts and plain objects: made empty first, so that they may hold themselves."""

    slot: int
    cls: type
    items: tuple[Any, ...] = ()
    mapping: tuple[tuple[Any, Any], ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()

    def build(self, tensors: Sequence[torch.Tensor], made: dict[int, Any]) -> Any:
        value = made[self.slot] = object_of(self.cls)
        if issubclass(self.cls, list):
            list.extend(value, (item.build(tensors, made) for item in self.items))
        # The class's own __setitem__ and __setattr__ may have side effects (ModelOutput copies
        # one into the other); what they did is already in the recorded items and attributes.
        put: Any = dict.__setitem__
        if issubclass(self.cls, dict):
            base: Any = next(c for c in self.cls.__mro__ if c.__module__ in _DICTS)
            put = base.__setitem__
        for key, item in self.mapping:
            put(value, key, item.build(tensors, made))
        for name, item in self.attributes:
            object.__setattr__(value, name, item.build(tensors, made))
        return value


_DICTS = ("builtins", "collections")


def object_of(cls: type) -> Any:
    """Make an instance that no ``__init__`` has seen."""
    make: Any = cls.__new__
    return make(cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """An output object without its tensors.

    Attributes
    ----------
    count : int
        How many tensors `build` takes.
    opaque : tuple of object
        What `build` passes on without having looked into it: functions, sets, views of dicts,
        iterators. What tensors they hold is for `held_by` to find.
    """

    count: int
    opaque: tuple[Any, ...] = field(default=(), repr=False)
    _spec: Any = field(repr=False)

    @classmethod
    def describe(cls, output: Any) -> tuple[Template, tuple[torch.Tensor, ...]]:
        """Take an output apart.

        Parameters
        ----------
        output : object
            Tensors, None, scalars, nested tuples, lists, dicts, named tuples, ``ModelOutput``,
            dataclasses and plain objects with tensors in their attributes. Objects without a
            tensor inside are passed on as they are.

        Returns
        -------
        template : Template
        tensors : tuple of Tensor
            In template order, each object once.
        """
        describer = _Describer()
        spec = describer.visit(output, 0)
        template = cls(count=len(describer.tensors), opaque=tuple(describer.opaque), _spec=spec)
        return template, tuple(describer.tensors)

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Make a fresh output of the same type and structure from `tensors`."""
        if len(tensors) != self.count:
            raise CaptureError(f"Output needs {self.count} tensors, got {len(tensors)}.")
        return self._spec.build(tensors, {})


# Held by nothing, or looked at elsewhere.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)
_APART = (*_PLAIN, torch.nn.Module, types.ModuleType, types.CodeType)


def held_by(value: Any) -> Iterator[torch.Tensor]:
    """Walk the tensors that an object refers to by any way, modules and globals aside."""
    pending, seen = [value], set()
    while pending:
        found = pending.pop()
        if isinstance(found, torch.Tensor):
            yield found
        if id(found) in seen or isinstance(found, (torch.Tensor, *_APART)):
            continue
        seen.add(id(found))
        if isinstance(found, types.FunctionType):
            pending += [found.__closure__, found.__defaults__, found.__kwdefaults__]
        else:
            pending += gc.get_referents(found)


class _Describer:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.indices: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.opaque: list[Any] = []
        self._numbers = itertools.count()

    def visit(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.indices:
                self.indices[id(value)] = len(self.tensors)
                self.tensors.append(value)
            return _Leaf(self.indices[id(value)])
        if depth > 12 or (is_atom(value) and not isinstance(value, (tuple, list, dict))):
            return self._constant(value)
        if id(value) in self.slots:
            return _Again(self.slots[id(value)])
        slot = self.slots[id(value)] = next(self._numbers)
        spec = self._container(value, slot, depth + 1)
        if not _holds_tensor(spec) and not isinstance(value, (list, dict)):
            # Neither it nor what is in it will be made: nothing can be it again.
            self.slots = {key: made for key, made in self.slots.items() if made < slot}
            return self._constant(value)
        return spec

    def _constant(self, value: Any) -> _Constant:
        if not isinstance(value, _PLAIN):
            self.opaque.append(value)
        return _Constant(value)

    def _container(self, value: Any, slot: int, depth: int) -> Any:
        cls = type(value)
        if isinstance(value, tuple):
            return _Tuple(slot, cls, tuple(self.visit(item, depth) for item in value))
        items: tuple[Any, ...] = ()
        mapping: tuple[tuple[Any, Any], ...] = ()
        if isinstance(value, list):
            items = tuple(self.visit(item, depth) for item in value)
        elif isinstance(value, dict):
            pairs = list(dict.items(value))
            mapping = tuple((key, self.visit(item, depth)) for key, item in pairs)
            self.opaque += [key for key, _ in pairs if not isinstance(key, _PLAIN)]
        elif (children(value, objects=False) or isinstance(value, CONTAINERS)) and any(
            tensors_within(value, objects=True)
        ):
            raise CaptureError(
                f"A {cls.__name__} holds tensors, and cannot be rebuilt around others. "
                f"Hand them over in a tuple, list, dict or dataclass."
            )
        # In the order of `_Container.build`: what is met again must have been made by then.
        state = fields_of(value)
        attributes = tuple((name, self.visit(item, depth)) for name, item in state.items())
        return _Container(slot, cls, items, mapping, attributes)


def _holds_tensor(spec: Any) -> bool:
    if isinstance(spec, (_Leaf, _Again)):
        return True
    if isinstance(spec, _Tuple):
        return any(map(_holds_tensor, spec.items))
    if isinstance(spec, _Container):
        pairs = (*spec.mapping, *spec.attributes)
        return any(map(_holds_tensor, (*spec.items, *(item for _, item in pairs))))
    return False


def source_of(template: Template, tensors: str, space: dict[str, Any]) -> str | None:
    """Write what ``build`` makes as a Python expression, for a compiler to read.

    Parameters
    ----------
    template : Template
    tensors : str
        The variable that holds the output tensors.
    space : dict
        Globals of the expression; classes are put there.

    Returns
    -------
    str or None
        None for outputs that only ``build`` can make.

    Examples
    --------
    >>> template, _ = Template.describe({"loss": torch.zeros(()), "parts": (torch.ones(1), 3)})
    >>> source_of(template, "t", {})
    "{'loss': t[0], 'parts': (t[1], 3,)}"
    """
    try:
        return _source(template._spec, tensors, space)
    except _Unwritable:
        return None


class _Unwritable(Exception):
    pass


def _source(spec: Any, tensors: str, space: dict[str, Any]) -> str:
    if isinstance(spec, _Leaf):
        return f"{tensors}[{spec.index}]"
    if isinstance(spec, _Constant) and isinstance(spec.value, (type(None), bool, int, str)):
        return repr(spec.value)
    if isinstance(spec, _Tuple) and spec.cls is tuple:
        return f"({''.join(f'{_source(item, tensors, space)}, ' for item in spec.items).strip()})"
    if not isinstance(spec, _Container):
        raise _Unwritable
    pairs = [(key, _source(item, tensors, space)) for key, item in spec.mapping]
    if spec.cls is dict:
        return f"{{{', '.join(f'{key!r}: {text}' for key, text in pairs)}}}"
    if spec.cls is list:
        return f"[{', '.join(_source(item, tensors, space) for item in spec.items)}]"
    # transformers' and diffusers' outputs: a dict whose entries are its fields too.
    fields = {name: _source(item, tensors, space) for name, item in spec.attributes}
    given = {name: text for name, text in fields.items() if text != "None"}
    if not dataclasses.is_dataclass(spec.cls) or given != dict(pairs):
        raise _Unwritable
    name = f"output_class_{len(space)}"
    space[name] = spec.cls
    return f"{name}({', '.join(f'{name}={text}' for name, text in pairs)})"
