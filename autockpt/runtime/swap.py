"""The class of an optimized module: the original's in all but ``forward``.

``isinstance``, names, signature, pickling and copying work as for the original class.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from autockpt.modules.parts import uninstall
from autockpt.runtime.bypass import bypassed
from autockpt.runtime.handle import Handle

ATTRIBUTE = "autockpt"
ModuleT = TypeVar("ModuleT", bound=nn.Module)

_classes: dict[type[nn.Module], type[nn.Module]] = {}
_classes_lock = threading.Lock()


def is_optimized(module: nn.Module) -> bool:
    """Tell whether a module came from ``optimize``."""
    return original_class(type(module)) is not type(module)


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Give the class that the user wrote."""
    found: type[nn.Module] = cls.__dict__.get("_autockpt_original", cls)
    return found


def adopt(module: ModuleT, handle: Handle) -> ModuleT:
    """Turn a module, in place, into one whose training forward is planned."""
    original = original_class(type(module))
    _set_class(module, optimized_class(original))
    # Not through nn.Module.__setattr__: some classes have a say in what may be set.
    object.__setattr__(module, ATTRIBUTE, handle)
    return module


def release(module: ModuleT) -> ModuleT:
    """Undo ``adopt``, in place, in submodules too."""
    uninstall(module)
    if is_optimized(module):
        _set_class(module, original_class(type(module)))
        object.__delattr__(module, ATTRIBUTE)
    return module


def _set_class(module: Any, cls: type[nn.Module]) -> None:
    module.__class__ = cls


def optimized_class(original: type[nn.Module]) -> type[nn.Module]:
    """Make the subclass of a module class, once."""
    with _classes_lock:
        if original not in _classes:
            _classes[original] = _make_class(original)
        return _classes[original]


def _make_class(original: type[nn.Module]) -> type[nn.Module]:
    plain: Callable[..., Any] = original.forward

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if bypassed() or not torch.is_grad_enabled():
            return plain(self, *args, **kwargs)
        handle: Handle = getattr(self, ATTRIBUTE)
        if torch.compiler.is_dynamo_compiling():
            # It needs all of Dynamo, which takes longer to import than torch.
            from autockpt.runtime.traced import forward as traced

            return traced(handle, self, plain, args, kwargs)
        return handle.run(self, args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return _reduce(self, super(made, self).__reduce_ex__(protocol))

    names = ("__module__", "__qualname__", "__doc__")
    metaclass: Any = type(original)
    made: type[nn.Module] = metaclass(
        original.__name__,
        (original,),
        {
            **{name: getattr(original, name) for name in names},
            "forward": forward,
            "__reduce_ex__": reduce,
            "_autockpt_original": original,
        },
    )
    return made


def _reduce(module: nn.Module, reduced: Any) -> tuple[Any, ...]:
    """Rewrite what a class's own ``__reduce_ex__`` says: build the original class, then adopt.

    A copy has module objects of its own, and a pickle may be read where the emitted code would
    not fit any more: the handle goes along with settings and plan, and records anew.
    """
    function, args, *rest = reduced
    original = original_class(type(module))
    args = tuple(original if arg is type(module) else arg for arg in args)
    if rest and isinstance(rest[0], dict):
        state = {name: value for name, value in rest[0].items() if name != ATTRIBUTE}
        rest = [state, *rest[1:]]
    return (rebuild, (module.__dict__[ATTRIBUTE], function, args), *rest)


def rebuild(handle: Handle, function: Callable[..., nn.Module], args: tuple[Any, ...]) -> Any:
    """Make a copied or unpickled module, before its state is set."""
    return adopt(function(*args), handle.fresh())
