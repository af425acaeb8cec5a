"""Full backward hooks of modules inside the model, in a forward that calls no modules.

``torch.nn.Module`` hangs such a hook between two identities, one on the module's inputs and one
on its outputs. Each is recorded as one op, which in a training forward sets up the same hook
anew. Recomputed, it sets up one that never fires: autograd runs the graph of the forward alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.hooks import BackwardHook

from autockpt.runtime.bypass import bypassed

_local = threading.local()


class _Hooked:
    """One call of a module with backward hooks: where its tensors are among its arguments.

    The module is held weakly: an op hangs on the model that it belongs to.
    """

    def __init__(self, module: torch.nn.Module, count: int) -> None:
        self.module = weakref.ref(module)
        self.count = count
        self.hooks: Any = threading.local()

    def set_up(self, args: tuple[Any, ...]) -> Any:
        """Make torch's own hook, as a call of the module would."""
        module = self.module()
        assert module is not None
        full, _ = module._get_backward_hooks()
        self.hooks.now = BackwardHook(module, full, module._get_backward_pre_hooks())
        return self.hooks.now.setup_input_hook(args)


class _Point:
    """The identity on one side of a module, as the target of a node."""

    def __init__(self, hooked: _Hooked, side: str, places: list[int], count: int) -> None:
        self._hooked = hooked
        self._side = side
        self._places = places
        self._count = count
        self.__name__ = f"backward_hooks_{side}"
        self.__qualname__ = f"{self.__name__}{places}/{count}"

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # While a step is planned its backward is rehearsed, which the user's hooks must not see.
        if bypassed():
            identity: tuple[torch.Tensor, ...] = BackwardHookFunction.apply(*tensors)
            return identity
        args: list[Any] = [None] * self._count
        for place, tensor in zip(self._places, tensors, strict=True):
            args[place] = tensor
        if self._side == "before":
            found = self._hooked.set_up(tuple(args))
        else:
            found = self._hooked.hooks.now.setup_output_hook(tuple(args))
        return tuple(found[place] for place in self._places)


class _Without(_Point):
    """The side behind a module whose inputs require no grad, so that there is none before it."""

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not bypassed():
            self._hooked.set_up((None,) * self._hooked.count)
        return super().__call__(*tensors)


def set_up_input(hook: Any, args: tuple[Any, ...], original: Callable[..., Any]) -> Any:
    """Stand in for ``BackwardHook.setup_input_hook`` while a forward is recorded."""
    hook.autockpt = _Hooked(hook.module, len(args))
    with _next(_Point(hook.autockpt, "before", _places(args), len(args))):
        return original(hook, args)


def set_up_output(hook: Any, args: Any, original: Callable[..., Any]) -> Any:
    """Stand in for ``BackwardHook.setup_output_hook`` while a forward is recorded."""
    outputs = args if isinstance(args, tuple) else (args,)
    kind = _Without if hook.input_tensors_index is None else _Point
    with _next(kind(hook.autockpt, "after", _places(outputs), len(outputs))):
        return original(hook, args)


def point_of(function: Any) -> Callable[..., Any] | None:
    """Give what to record instead of ``BackwardHookFunction.apply``."""
    point: Callable[..., Any] | None = getattr(_local, "point", None)
    return point if function is BackwardHookFunction else None


@contextmanager
def _next(point: _Point) -> Iterator[None]:
    _local.point = point
    try:
        yield
    finally:
        _local.point = None


def _places(values: tuple[Any, ...]) -> list[int]:
    return [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
