"""When a plan of module calls is still that of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autockpt.capture.ambient import Ambient
from autockpt.capture.freeze import layout_of
from autockpt.capture.whole import whole_class


class ModuleKey:
    """What the memory of a step depends on: shapes, modes, and which parameters train.

    Unlike the key of a recorded graph it leaves out attributes and numbers among the arguments:
    the model's own Python runs, and may count its steps.
    """

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._types = _device_types(model)
        self._ambient = Ambient.current(self._types)
        self._call = _describe_call(args, kwargs)
        self._model = _describe_model(model)
        self._token: object | None = None

    @classmethod
    def take(
        cls, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> ModuleKey:
        """Describe a model and a call now."""
        return cls(model, args, kwargs or {})

    def matches(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        token: object | None = None,
    ) -> bool:
        """Whether a call needs the memory that this one needed; `token` is as for ``Key``."""
        if self._ambient != Ambient.current(self._types):
            return False
        if self._call != _describe_call(args, kwargs or {}):
            return False
        if token is not None and token is self._token:
            return True
        matches = self.model_matches(model)
        self._token = token if matches else None
        return matches

    def model_matches(self, model: nn.Module) -> bool:
        """Whether any call of the model may need the memory that this one needed."""
        return self._model == _describe_model(model)

    @property
    def device_types(self) -> tuple[str, ...]:
        """Device types of the model."""
        return self._types


def _device_types(model: nn.Module) -> tuple[str, ...]:
    return tuple(sorted({"cpu", *(p.device.type for p in model.parameters())}))


def _describe_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return spec, tuple(map(_describe, leaves))


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return layout_of(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    return type(value)


def _describe_model(model: nn.Module) -> tuple[Any, ...]:
    found: list[Any] = []
    for name, module in model.named_modules():
        found.append((name, whole_class(type(module)), module.training))
        for parameter in module._parameters.values():
            if parameter is not None:
                found.append((parameter.shape, parameter.dtype, parameter.requires_grad))
    return tuple(found)
