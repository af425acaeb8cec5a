"""When a capture is still valid: a key that is compared at every call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules import module as _module_globals

from autockpt.capture.ambient import Ambient
from autockpt.capture.freeze import Freezer, layout_of
from autockpt.capture.paths import forward_of, is_apart
from autockpt.capture.snapshot import GLOBAL_HOOKS, Snapshot
from autockpt.capture.tree import Binding
from autockpt.capture.whole import whole_class

_TENSOR_TABLES = frozenset({"_parameters", "_buffers"})


class Key:
    """What a recorded forward depends on besides the values of tensors.

    Class, ``training``, plain attributes, hook tables and children of every module, global
    hooks, layout and sharing of parameters and buffers, arguments (tensors by layout and
    sharing, everything else by value), and the ambient modes. Config objects and other
    objects in attributes count one level deep, as do modules that are no part of the tree;
    closures, globals, and attributes of classes and functions do not count.

    Notes
    -----
    `matches` first compares object identities, which is what an unchanged model comes down
    to, and only where one differs compares values. So a deep copy, or parameters that were
    replaced by ones of the same layout, still match.
    """

    def __init__(
        self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._call = _describe_call(Binding.of(forward_of(model)), model, args, kwargs)
        self._types = _device_types(model, args, kwargs)
        self._ambient = Ambient.current(self._types)
        self._modes = _modes()
        self._binding = Binding.of(forward_of(model))
        self._model = _describe_model(model)
        self._tensors = _describe_tensors(model)
        self._fast = Snapshot(model)
        self._token: object | None = None

    @classmethod
    def take(
        cls, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> Key:
        """Describe a model and a call now."""
        return cls(model, args, kwargs or {})

    def matches(
        self,
        model: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        token: object | None = None,
    ) -> bool:
        """Whether the capture holds for this call of `model`.

        Parameters
        ----------
        model : torch.nn.Module
        args, kwargs : sequence, mapping
        token : object, optional
            Of ``Untouched``, for this model now.

        Returns
        -------
        bool
            False at the first difference.
        """
        if self._ambient != Ambient.current(self._types) or self._modes != _modes():
            return False
        if self._call != _describe_call(self._binding, model, args, kwargs or {}):
            return False
        if token is not None and token is self._token:
            return True
        matches = self.model_matches(model)
        self._token = token if matches else None
        return matches

    def model_matches(self, model: torch.nn.Module) -> bool:
        """Whether the capture holds for `model`, whatever it is called with."""
        if self._fast.holds(model):
            return True
        if self._tensors != _describe_tensors(model) or self._model != _describe_model(model):
            return False
        self._fast = Snapshot(model)
        return True


def _describe_tensors(model: torch.nn.Module) -> tuple[Any, ...]:
    """Layouts of parameters and buffers, and which names are one tensor."""
    first: dict[int, str] = {}
    found = []
    for named in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in named:
            found.append((name, first.setdefault(id(tensor), name), layout_of(tensor)))
    return tuple(found)


def _describe_model(model: torch.nn.Module) -> tuple[Any, ...]:
    names = {id(module): name for name, module in model.named_modules()}
    freeze = Freezer(names)
    found: list[Any] = [freeze.value(getattr(_module_globals, n), 0) for n in GLOBAL_HOOKS]
    for name, module in model.named_modules():
        state = {
            key: freeze.value(value, 0)
            for key, value in vars(module).items()
            if not is_apart(key) and key not in _TENSOR_TABLES
        }
        found.append((name, whole_class(type(module)), state))
    return tuple(found)


def _describe_call(
    binding: Binding, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    freeze = Freezer({})
    call = {n: freeze.value(v, 0, deep=True) for n, v in binding.bind(args, kwargs).items()}
    # An argument may be a parameter of the model itself: one tensor by two ways.
    own = tuple(
        name
        for tensor in freeze.tensors
        if isinstance(tensor, torch.nn.Parameter)
        for name, parameter in model.named_parameters()
        if parameter is tensor
    )
    return tuple(call.items()), own


def _device_types(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    freeze = Freezer({})
    freeze.value((tuple(args), dict(kwargs)), 0, deep=True)
    tensors: Iterable[torch.Tensor] = (*model.parameters(), *model.buffers(), *freeze.tensors)
    return tuple(sorted({"cpu", *(tensor.device.type for tensor in tensors)}))


def _modes() -> tuple[int, ...]:
    """Return the identities of the user's function modes in force."""
    stack = torch.overrides._get_current_function_mode_stack()
    return tuple(id(m) for m in stack if not isinstance(m, torch.utils._device.DeviceContext))
