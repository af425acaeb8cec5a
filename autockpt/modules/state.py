"""What a module call finds when it begins, so that it can be run again as if nothing had passed.

The model's own Python runs again in backward. What it draws, writes and counts there must be
what it drew, wrote and counted in forward, and must leave no trace.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from autockpt.capture.ambient import Ambient
from autockpt.capture.calls import version
from autockpt.capture.restore import default_states
from autockpt.capture.watch import Watch
from autockpt.errors import RecomputationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What a module call does besides computing its result.

    Attributes
    ----------
    buffers : tuple of str
        Buffers that it reads and writes, by path from the module.
    statistics : tuple of str
        Buffers that it only updates: what it computes does not depend on them.
    modules : tuple of str
        Modules whose Python attributes it changes, by path from the root.
    arguments : bool
        Whether it changes objects that it is given (a cache, a list).
    """

    buffers: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    arguments: bool = False


# A cache of caches of layers lies deeper than what hangs on a module.
_ARGUMENT_DEPTH = -3


class Entered:
    """What a module call found when it began.

    Parameters
    ----------
    name : str
        Of the call, for errors.
    module : nn.Module
    arguments : object
        Its ``(args, kwargs)``.
    effects : Effects
    others : sequence of (str, nn.Module)
        The modules that ``effects.modules`` names.
    python : bool
        Whether python's and numpy's generators are drawn from.
    device_types : tuple of str
        Device types whose autocast state matters.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        arguments: Any,
        effects: Effects,
        others: Sequence[tuple[str, nn.Module]],
        *,
        python: bool,
        device_types: tuple[str, ...],
    ) -> None:
        self._name = name
        self._ambient = Ambient.current(device_types)
        self._random: list[torch.Tensor] | None = default_states()
        self._python = _python_states() if python else None
        self._parameters = [
            (path, part, key, parameter, version(parameter))
            for path, part in module.named_modules()
            for key, parameter in part._parameters.items()
            if parameter is not None
        ]
        self._buffers = [(*_owner(module, path), True) for path in effects.buffers]
        self._buffers += [(*_owner(module, path), False) for path in effects.statistics]
        self._copies = [
            part._buffers[key].detach().clone() if copied else None  # type: ignore[union-attr]
            for part, key, copied in self._buffers
        ]
        self._others = tuple(others)
        self._arguments = arguments if effects.arguments else None
        self._watches = self._look()

    def _look(self) -> list[Watch]:
        watches = [watch_module(path, other) for path, other in self._others]
        if self._arguments is not None:
            args, kwargs = self._arguments
            watches.append(watch_values((*args, *kwargs.values())))
        return watches

    def left(self) -> None:
        """Take note that the call has returned: what it did not touch need not be kept."""
        if self._random is not None and all(map(torch.equal, self._random, default_states())):
            self._random = None

    @property
    def drew(self) -> bool:
        """Whether the call drew random numbers (True until it has returned)."""
        return self._random is not None

    def again(self) -> Again:
        """Give the context in which the call runs again."""
        return Again(self)

    def check(self) -> None:
        """Raise if parameters are not what they were."""
        for path, part, key, parameter, number in self._parameters:
            now = part._parameters.get(key)
            name = f"{path}.{key}" if path else key
            if now is not parameter:
                raise self._changed(name, "was replaced by another tensor")
            if version(now) != number:
                raise self._changed(
                    name,
                    f"has been modified by an inplace operation (it is at version "
                    f"{version(now)}, expected version {number})",
                )

    def _changed(self, name: str, what: str) -> RecomputationError:
        return RecomputationError(
            f"Parameter {name} of module {self._name} {what} between forward and backward, and "
            f"that module's call needs it as it was to run again. Call backward before the "
            f"weights change (optimizer.step(), load_state_dict), or run forward again."
        )


class Again:
    """While entered, everything is as the call found it; afterwards, as it was before.

    Entered once for each backward that asks, and again while it is entered.
    """

    def __init__(self, entered: Entered) -> None:
        self._entered = entered
        self._before: list[_Before] = []

    def __enter__(self) -> None:
        entered = self._entered
        entered.check()
        before = _Before(entered)
        if entered._random is not None:
            _set_default_states(entered._random)
        if entered._python is not None:
            _set_python_states(entered._python)
        for watch in entered._watches:
            watch.undo()
        for (part, key, _), copy in zip(entered._buffers, entered._copies, strict=True):
            buffer = part._buffers[key]
            assert buffer is not None
            part._buffers[key] = buffer.detach().clone() if copy is None else copy.clone()
        before.ambient.__enter__()
        self._before.append(before)

    def __exit__(self, *error: Any) -> None:
        self._before.pop().put_back()


class _Before:
    """What there was before a call ran again."""

    def __init__(self, entered: Entered) -> None:
        self.ambient = entered._ambient.enter()
        self._random = None if entered._random is None else default_states()
        self._python = None if entered._python is None else _python_states()
        self._watches = entered._look()
        self._buffers = [(part, key, part._buffers[key]) for part, key, _ in entered._buffers]

    def put_back(self) -> None:
        self.ambient.__exit__(None, None, None)
        for watch in self._watches:
            watch.undo()
        for part, key, buffer in self._buffers:
            part._buffers[key] = buffer
        if self._random is not None:
            _set_default_states(self._random)
        if self._python is not None:
            _set_python_states(self._python)


def watch_module(name: str, module: nn.Module) -> Watch:
    """Look at the Python state of one module, its submodules apart."""
    watch = Watch()
    watch.visit_module(name, module)
    return watch


def watch_values(values: Iterable[Any]) -> Watch:
    """Look at containers and objects, a cache of layers say."""
    watch = Watch()
    for value in values:
        watch.visit("the arguments", value, _ARGUMENT_DEPTH)
    return watch


def _owner(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    prefix, _, key = path.rpartition(".")
    return module.get_submodule(prefix), key


def _set_default_states(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for index, state in enumerate(states[1:]):
        torch.cuda.set_rng_state(state, index)


def _python_states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_python_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
