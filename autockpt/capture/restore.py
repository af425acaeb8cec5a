"""Recording leaves no trace: what a forward changed is found out and put back."""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autockpt.capture.bits import identical
from autockpt.capture.guards import same
from autockpt.capture.paths import OURS, fields_of, is_atom, tensors_within
from autockpt.errors import CaptureError

Refuse = Callable[[str, str], CaptureError]

_ADVICE = (
    "Such a forward cannot be replayed: move the change out of the forward "
    "(a forward may write tensors in place, such as buffers)."
)
_OBJECT_DEPTH = 3


class Trace:
    """What there was before a forward: states, attributes, contents of containers.

    Parameters
    ----------
    model : torch.nn.Module
        All its modules' attributes are looked after, nested containers and plain objects too.
    args, kwargs : sequence, mapping
        The call's arguments, likewise.
    """

    def __init__(
        self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._random = RandomState()
        self._copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._copied: set[int] = set()
        self._generators: dict[torch.Generator, torch.Tensor] = {}
        for buffer in model.buffers():
            self.before_write(buffer, known=True)
        outside: list[torch.Tensor] = [*model.parameters()]
        outside += [t for _, t in tensors_within((args, dict(kwargs)), objects=True)]
        self._storages = {s for t in outside if (s := _storage(t)) is not None}
        self._model = model
        self._call = (tuple(args), dict(kwargs))
        self._settled = False
        self._before = self._watch = self._look()

    def before_write(self, tensor: torch.Tensor, known: bool = False) -> None:
        """Keep a copy of a tensor that is about to be written, if it is not the forward's own."""
        if id(tensor) in self._copied or tensor.is_inference():
            return
        # Results of the forward vanish with it, unless they share an outside tensor's storage.
        if known or _storage(tensor) in self._storages:
            self._copied.add(id(tensor))
            with torch.no_grad():
                self._copies.append((tensor, tensor.detach().clone(), tensor._version))

    def written(self, model: torch.nn.Module) -> tuple[str, ...]:
        """Name the parameters whose storage was written."""
        moved = {_storage(t) for t, copy, n in self._copies if t._version != n} - {None}
        return tuple(name for name, p in model.named_parameters() if _storage(p) in moved)

    def keep_generator(self, generator: torch.Generator) -> None:
        """Remember the state of a generator that is about to be drawn from."""
        self._generators.setdefault(generator, generator.get_state())

    def verify(self, refuse: Refuse) -> bool:
        """Raise if python's or numpy's random state moved, or an attribute was written.

        Returns
        -------
        bool
            False if nothing but settings were made, which another forward may find made.
        """
        if not self._random.python_is_same():
            raise refuse(
                "the forward draws from python's or numpy's random generator",
                "Draw with torch instead (torch.rand(()).item() is a guard).",
            )
        changes = list(self._watch.changes())
        for change in changes:
            if not change.settling or self._settled:
                raise refuse(f"the forward writes {change.where}", _ADVICE)
        return not changes

    def settle(self) -> None:
        """Take attributes as they are now: they stay, and must not change again."""
        self._watch = self._look()
        self._settled = True

    def _look(self) -> _Watch:
        watch = _Watch()
        for name, module in self._model.named_modules():
            watch.add(name, module, vars(module))
            for function in (module.forward, *hooks_of(module)):
                for key, value in outside_of(function).items():
                    watch.visit(key, value, 0)
        watch.visit("the arguments", self._call, 0)
        return watch

    def undo(self) -> None:
        """Put everything back, attributes to where they were settled."""
        self._watch.undo()
        self.undo_tensors()

    def undo_attributes(self) -> None:
        """Put attributes back to where they were at the very start."""
        self._before.undo()

    def undo_tensors(self) -> None:
        """Put tensors and random states back."""
        with torch.no_grad():
            for tensor, copy, version in self._copies:
                # The version alone does not tell: batch_norm writes its statistics behind it.
                if tensor._version != version or not identical(tensor, copy):
                    tensor.detach().copy_(copy)
        self._random.restore()
        for generator, state in self._generators.items():
            generator.set_state(state)


def _storage(tensor: torch.Tensor) -> int | None:
    strided = tensor.layout is torch.strided
    return int(tensor.untyped_storage()._cdata) if strided else None


class RandomState:
    """The random states of torch (all devices in use), python and numpy."""

    def __init__(self) -> None:
        self.torch = torch.get_rng_state()
        self.devices: dict[int, torch.Tensor] = {}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.devices = dict(enumerate(torch.cuda.get_rng_state_all()))
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def restore(self) -> None:
        """Set the states back."""
        torch.set_rng_state(self.torch)
        for index, state in self.devices.items():
            torch.cuda.set_rng_state(state, index)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def python_is_same(self) -> bool:
        """Whether python's and numpy's generators are still where they were."""
        now: Any = np.random.get_state()
        before: Any = self._numpy
        numpy_same = now[2:] == before[2:] and bool((now[1] == before[1]).all())
        return random.getstate() == self._python and numpy_same

    def torch_is(self, other: RandomState) -> bool:
        """Whether torch's generators stand where they stood in `other`."""
        return torch.equal(self.torch, other.torch) and all(
            torch.equal(state, other.devices[index]) for index, state in self.devices.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something that a forward wrote.

    Attributes
    ----------
    where : str
        For an error message.
    settling : bool
        Whether a plain value was set in an attribute: a setting that is made at the first
        call and then stays (``config.problem_type``), if a second forward leaves it alone.
    """

    where: str
    settling: bool


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """Forward hooks and pre-hooks of a module."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def outside_of(function: Any) -> dict[str, Any]:
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


class _Watch:
    """Shallow copies of namespaces and containers, to compare with and to restore from."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._namespaces: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[str, Any, Any]] = []

    def add(self, where: str, owner: Any, namespace: dict[str, Any], depth: int = 0) -> None:
        self._seen[id(owner)] = owner
        name = f"'{where}' ({type(owner).__name__})" if where else type(owner).__name__
        self._namespaces.append((name, namespace, dict(namespace)))
        for key, value in namespace.items():
            if key in OURS:
                continue
            self.visit(f"{where}.{key}" if where else key, value, depth)

    def visit(self, where: str, value: Any, depth: int) -> None:
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
        for owner, namespace, before in self._namespaces:
            for name in dict.fromkeys((*namespace, *before)):
                old, new = before.get(name, _MISSING), namespace.get(name, _MISSING)
                if not _unchanged(new, old):
                    plain = (_is_plain(old) or old is _MISSING) and _is_plain(new)
                    yield Change(where=f"attribute '{name}' of {owner}", settling=plain)
        for where, container, before in self._containers:
            if not _same_contents(container, before):
                kind = type(container).__name__
                yield Change(where=f"the {kind} '{where}'", settling=False)

    def undo(self) -> None:
        for _, namespace, before in self._namespaces:
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


_MISSING = object()


def _same_contents(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), before.items(), strict=True)
        return all(a[0] == b[0] and _unchanged(a[1], b[1]) for a, b in pairs)
    if isinstance(container, set):
        return bool(container == before)
    return all(map(_unchanged, container, before))


def _unchanged(now: Any, before: Any) -> bool:
    return now is before or (_is_plain(now) and same(now, before))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    plain = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
    return value is None or isinstance(value, plain)


@contextmanager
def untraced(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Trace]:
    """Run a forward inside a ``with`` block that puts back whatever it changed.

    Parameters
    ----------
    model : torch.nn.Module
    args, kwargs : sequence, mapping
        The call that runs inside.

    Yields
    ------
    Trace
        Tell it with `Trace.before_write` of tensors that are about to be written in place
        (buffers are looked after anyway).
    """
    trace = Trace(model, args, kwargs)
    try:
        yield trace
    except BaseException:
        trace.undo_attributes()
        trace.undo_tensors()
        raise
    trace.undo()
