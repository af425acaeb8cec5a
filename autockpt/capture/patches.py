"""What is changed in torch while a recording runs, and put back afterwards.

The patches are installed under a lock; each asks whether the calling thread is the one that
records, and does what torch does otherwise in all other threads.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.autograd.function import _SingleLevelFunction
from torch.utils.hooks import BackwardHook

from autockpt.capture import module_hooks

_LOCK = threading.RLock()
_ACTIVE = threading.local()
_NOT_THERE = object()
_MODULES = os.path.dirname(torch.nn.modules.__file__) + os.sep
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class Listener(Protocol):
    """What the patches tell a recorder."""

    paused: int

    def opaque(self, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run an ``autograd.Function``."""

    def enter_module(self, module: torch.nn.Module) -> None:
        """Take note that a module is called."""

    def leave_module(self) -> None:
        """Take note that the module returns or raises."""

    def dissolve(self) -> None:
        """Take note that the model calls ``checkpoint`` itself."""

    def cast(self, module: torch.nn.Module, run: Callable[[], Any]) -> Any:
        """Run a ``module.to(...)``."""

    def refuse(self, reason: str, advice: str) -> Exception:
        """Make the error to raise where the model cannot be captured."""


def listener() -> Listener | None:
    """Return the recorder of this thread, unless it is paused."""
    found: Listener | None = getattr(_ACTIVE, "listener", None)
    return found if found is not None and not found.paused else None


@contextmanager
def patched(recorder: Listener) -> Iterator[None]:
    """Patch torch for a ``with`` block, on behalf of `recorder` and this thread."""
    with _LOCK:
        undo: list[tuple[Any, str, Any]] = []

        def replace(owner: Any, name: str, value: Any) -> None:
            undo.append((owner, name, owner.__dict__.get(name, _NOT_THERE)))
            setattr(owner, name, value)

        try:
            _ACTIVE.listener = recorder
            for name in _CHECKS:
                replace(F, name, _say_no(getattr(F, name)))
            name = "has_torch_function"
            replace(torch.overrides, name, _say_no_to_modules(torch.overrides.has_torch_function))
            replace(torch.nn.Module, "__call__", _module_call(torch.nn.Module.__call__))
            replace(torch.nn.Module, "_apply", _cast(torch.nn.Module._apply))
            # Below ``Function.apply``, which people bind to a name when they import: what comes
            # next in the order of classes is asked for anew at each call.
            replace(_SingleLevelFunction, "apply", _apply())
            replace(BackwardHook, "setup_input_hook", _hook(BackwardHook.setup_input_hook, True))
            replace(BackwardHook, "setup_output_hook", _hook(BackwardHook.setup_output_hook, False))
            replace(torch.autograd, "_engine_run_backward", _engine(torch.autograd))
            name = "_saved_tensors_hooks_disable"
            replace(torch._C._autograd, name, _transforms(torch._C._autograd))
            checkpoint = torch.utils.checkpoint
            name = "_checkpoint_without_reentrant_generator"
            replace(checkpoint, name, _dissolve(checkpoint.__dict__[name]))
            yield
        finally:
            _ACTIVE.listener = None
            for owner, name, value in reversed(undo):
                if value is _NOT_THERE:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)


def _say_no(check: Callable[..., bool]) -> Callable[..., bool]:
    # Functionals that are written in python ask this to hand themselves over as one call.
    # They open up into the calls inside, which are recorded one by one.
    def has_torch_function(*args: Any) -> bool:
        return False if listener() is not None else check(*args)

    return has_torch_function


def _say_no_to_modules(check: Callable[..., bool]) -> Callable[..., bool]:
    # torch's own attention modules take a fast path unless something overrides torch
    # functions; recording must not change which path that is.
    def has_torch_function(*args: Any) -> bool:
        if listener() is not None and sys._getframe(1).f_code.co_filename.startswith(_MODULES):
            return False
        return check(*args)

    return has_torch_function


def _module_call(call: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = listener()
        if recorder is None:
            return call(self, *args, **kwargs)
        recorder.enter_module(self)
        try:
            return call(self, *args, **kwargs)
        finally:
            recorder.leave_module()

    return __call__


def _cast(cast: Callable[..., Any]) -> Callable[..., Any]:
    def _apply(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = listener()
        if recorder is None:
            return cast(self, *args, **kwargs)
        return recorder.cast(self, lambda: cast(self, *args, **kwargs))

    return _apply


def _apply() -> Any:
    called: Any = torch.autograd.Function.__dict__["apply"]
    runs: Any = torch._C._FunctionBase.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        recorder = listener()
        if recorder is None:
            return runs.__get__(None, cls)(*args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            recorder.dissolve()
            function, _preserve, *rest = args
            return function(*rest)
        # Bound to the class as the user's code would find it: a target that still stands
        # when the patch is gone.
        bound = called.__get__(None, cls)
        return recorder.opaque(module_hooks.point_of(cls) or bound, args, kwargs)

    return classmethod(apply)


def _hook(original: Callable[..., Any], before: bool) -> Callable[..., Any]:
    stand_in = module_hooks.set_up_input if before else module_hooks.set_up_output

    def set_up(self: Any, args: Any) -> Any:
        return original(self, args) if listener() is None else stand_in(self, args, original)

    return set_up


def _dissolve(generator: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    def _checkpoint_without_reentrant_generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        recorder = listener()
        if recorder is None:
            yield from generator(*args, **kwargs)
            return
        recorder.dissolve()
        yield

    return _checkpoint_without_reentrant_generator


def _transforms(owner: Any) -> Callable[..., Any]:
    original: Callable[..., Any] = owner._saved_tensors_hooks_disable

    # The gradient transforms of torch.func forbid saved-tensor hooks before they do anything.
    def _saved_tensors_hooks_disable(*args: Any) -> Any:
        recorder = listener()
        if recorder is None:
            return original(*args)
        raise recorder.refuse(
            "a torch.func transform (vmap, grad, jvp) runs",
            "Leave that part out of the module that is optimized.",
        )

    return _saved_tensors_hooks_disable


def _engine(owner: Any) -> Callable[..., Any]:
    original: Callable[..., Any] = owner._engine_run_backward

    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        recorder = listener()
        if recorder is None:
            return original(*args, **kwargs)
        raise recorder.refuse(
            "autograd runs inside the forward",
            "Move the torch.autograd.grad or backward call out of the forward.",
        )

    return _engine_run_backward
