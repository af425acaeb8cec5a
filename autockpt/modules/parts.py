"""The classes of submodules whose calls may be regions: the original's in all but ``forward``.

A submodule of such a class does what it always did, unless its root is called by us: then the
caller of this thread decides how its forward runs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from autockpt.capture.whole import WHOLE, whole_class

Forward = Callable[..., Any]

REGION = "_autockpt_region"
_local = threading.local()
_classes: dict[type[nn.Module], type[nn.Module]] = {}
_lock = threading.Lock()


class Caller(Protocol):
    """Whoever runs a model's forward, and is asked at each call of a submodule."""

    def call(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``forward(module, *args, **kwargs)`` one way or the other."""


@contextmanager
def calling(caller: Caller | None) -> Iterator[None]:
    """Let a caller decide about the submodules that this thread calls."""
    before = exchange(caller)
    try:
        yield
    finally:
        exchange(before)


def exchange(caller: Caller | None) -> Caller | None:
    """Put a caller in place for this thread; return the one before it."""
    before: Caller | None = getattr(_local, "caller", None)
    _local.caller = caller
    return before


def install(root: nn.Module) -> bool:
    """Give every submodule a class that asks the caller; the root keeps its own.

    Returns
    -------
    bool
        Whether one had another class.
    """
    changed = False
    for module in root.modules():
        cls = type(module)
        # A class that was made on top of ours (FSDP's) asks as well.
        if module is root or hasattr(cls, WHOLE) or cls.forward is nn.Module.forward:
            continue
        _set_class(module, part_class(cls))
        changed = True
    return changed


def uninstall(root: nn.Module) -> None:
    """Give every submodule its own class back."""
    for module in root.modules():
        if is_part(module):
            _set_class(module, whole_class(type(module)))
            vars(module).pop(REGION, None)


def mark(root: nn.Module, paths: Container[str]) -> None:
    """Say which modules are regions where a compiler traces the model: no caller is asked there."""
    for path, module in root.named_modules():
        if not hasattr(type(module), REGION):
            continue
        if path in paths:
            vars(module)[REGION] = True
        else:
            vars(module).pop(REGION, None)


def region_of(
    plain: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a call as a checkpoint of the compiler, which traces this."""
    call = functools.partial(plain, module)
    return torch_checkpoint.checkpoint(call, *args, use_reentrant=False, **kwargs)


def is_part(module: nn.Module) -> bool:
    """Tell whether a module's class is one of ours."""
    return WHOLE in type(module).__dict__


def part_class(whole: type[nn.Module]) -> type[nn.Module]:
    """Make the subclass of a module class, once."""
    with _lock:
        if whole not in _classes:
            _classes[whole] = _make_class(whole)
        return _classes[whole]


def _make_class(whole: type[nn.Module]) -> type[nn.Module]:
    plain: Forward = whole.forward

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if not torch.is_grad_enabled():
                return plain(self, *args, **kwargs)
            if getattr(self, REGION):
                return region_of(plain, self, args, kwargs)
            if torch.compiler.is_dynamo_compiling():
                # It needs all of Dynamo, which takes longer to import than torch.
                from autockpt.modules.traced import part

                return part(plain, self, args, kwargs)
            return plain(self, *args, **kwargs)
        caller: Caller | None = getattr(_local, "caller", None)
        if caller is None:
            return plain(self, *args, **kwargs)
        return caller.call(self, plain, args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super(made, self).__reduce_ex__(protocol)
        function, args, *rest = reduced
        args = tuple(whole if arg is type(self) else arg for arg in args)
        return (_rebuild, (function, args), *rest)

    names = ("__module__", "__qualname__", "__doc__")
    metaclass: Any = type(whole)
    made: type[nn.Module] = metaclass(
        whole.__name__,
        (whole,),
        {
            **{name: getattr(whole, name) for name in names},
            "forward": forward,
            "__reduce_ex__": reduce,
            WHOLE: whole,
            REGION: False,
        },
    )
    return made


def _rebuild(function: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    """Make a copied or unpickled submodule, before its state is set."""
    module = function(*args)
    _set_class(module, part_class(type(module)))
    return module


def _set_class(module: Any, cls: type[nn.Module]) -> None:
    module.__class__ = cls
