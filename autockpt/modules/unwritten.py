"""Forwards that run for planning only leave every tensor that was there before as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autockpt.capture.calls import may_write
from autockpt.capture.paths import tensors_within
from autockpt.capture.restore import Trace, untraced
from autockpt.capture.stream import leaves
from autockpt.capture.targets import resolve


@contextmanager
def unwritten(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Trace]:
    """Run the model's own forward inside a ``with`` block that puts back whatever it changed.

    As ``untraced``, for a forward of which nothing is known yet. The batch is copied, as it is
    small and may be written by what no mode sees (numpy on the same memory). Parameters and
    tensors in attributes are copied when a call is about to write them.

    Parameters
    ----------
    model : nn.Module
    args, kwargs
        The call that runs inside.
    """
    with untraced(model, args, kwargs) as trace:
        for _, tensor in tensors_within((args, kwargs), objects=True):
            if not tensor.is_nested:
                trace.before_write(tensor, known=True)
        keeper = _Keeper(trace)
        try:
            with keeper:
                yield trace
        finally:
            keeper.put_back()


class _Keeper(TorchFunctionMode):
    """Tells a trace of the tensors that a torch call is about to write."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace
        self._data: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        target = resolve(func)
        if target.op == "set_property" and target.name == "data":
            self._data.setdefault(id(args[0]), (args[0], args[0].data))
        elif _may_write(target.name, kwargs):
            for tensor in leaves((args, kwargs)):
                self._trace.before_write(tensor)
        return func(*args, **kwargs)

    def put_back(self) -> None:
        """Give tensors that were led to other memory their own memory back."""
        for tensor, data in self._data.values():
            tensor.data = data


def _may_write(name: str, kwargs: Mapping[str, Any]) -> bool:
    # Of ``functional``'s own functions only the outermost is seen, with all its arguments named.
    inside = kwargs.get("inplace") is True or kwargs.get("max_norm") is not None
    return inside or may_write(name, kwargs)
