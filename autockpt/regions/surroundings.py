"""What a region finds again when it runs again: its arguments, autocast, random generators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._device import DeviceContext

from autockpt.regions.remade import rooted

_make_saved: Any = getattr(torch._C._autograd, "_make_saved_tensor", None)
_SavedTensor: Any = getattr(torch._C._autograd, "SavedTensor", ())


Layout = tuple[tuple[int, ...], int]
"""Strides and offset of a tensor in its storage."""


def laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Give a tensor as it lay in forward: hooks around the step may give it back otherwise."""
    strides, offset = layout
    if tensor.stride() == strides and tensor.storage_offset() == offset:
        return tensor
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    room = tensor.new_empty(max(0, offset + reach + 1) if tensor.numel() else 0)
    # What is expanded is one element.
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    found = room.as_strided(tensor.shape, strides, offset)
    found[once].copy_(tensor[once])
    return found


class Inputs:
    """The arguments of a call, held as autograd holds what it saves.

    A tensor that is written to since is an error, and hooks around the step see it. Where these
    give it back with other strides, it is laid out as it was: another kernel may round otherwise.
    """

    __slots__ = ("_held", "_saved", "_strides")

    def __init__(self, arguments: Sequence[Any]) -> None:
        self._saved: Any = None
        self._strides = [
            a.stride() if isinstance(a, torch.Tensor) and a.layout is torch.strided else None
            for a in arguments
        ]
        if _make_saved is None:
            tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
            self._saved = _Saved.apply(  # type: ignore[no-untyped-call]
                torch.empty(0, requires_grad=True), *tensors
            )
            self._held = [_A_TENSOR if isinstance(a, torch.Tensor) else a for a in arguments]
        else:
            self._held = [
                _make_saved(a, is_output=False) if isinstance(a, torch.Tensor) else a
                for a in arguments
            ]

    def unpacked(self) -> list[Any]:
        """Give the arguments."""
        found: list[Any]
        if self._saved is None:
            found = [x.unpack() if isinstance(x, _SavedTensor) else x for x in self._held]
        else:
            tensors = iter(self._saved.grad_fn.saved_tensors)
            found = [next(tensors) if x is _A_TENSOR else x for x in self._held]
        for number, strides in enumerate(self._strides):
            if strides is not None and found[number].stride() != strides:
                tensor = found[number]
                laid = laid_out(tensor.detach(), (strides, 0))
                (found[number],) = rooted((laid,), [tensor.requires_grad])
        return found


class _Saved(torch.autograd.Function):
    """Nothing but saved tensors, before torch 2.13."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return root.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("nothing comes of it")


_A_TENSOR = object()


class Modes:
    """Autocast, for the devices of some tensors and the CPU, and the default device."""

    __slots__ = ("_autocasts", "_device", "_kinds")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._kinds = dict.fromkeys(t.device.type for t in tensors if not t.is_cpu)
        # None stands for what is nearly always so: there is none.
        self._autocasts = self._now() if torch._C._is_any_autocast_enabled() else None
        self._device: Any = None
        if torch._C._len_torch_function_stack():
            modes = reversed(_get_current_function_mode_stack())
            self._device = next((mode for mode in modes if isinstance(mode, DeviceContext)), None)

    def _now(self) -> list[dict[str, Any]]:
        return [
            {
                "device_type": kind,
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in [*self._kinds, "cpu"]
            if torch.amp.is_autocast_available(kind)
        ]

    def again(self) -> AbstractContextManager[Any]:
        """Bring it back."""
        autocasts = self._autocasts
        if autocasts is None and torch._C._is_any_autocast_enabled():
            autocasts = [{**now, "enabled": False} for now in self._now()]
        if autocasts is None and self._device is None:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for autocast in autocasts or ():
            stack.enter_context(torch.amp.autocast(**autocast))
        if self._device is not None:
            stack.enter_context(self._device)
        return stack


class Random:
    """The generators of the CPU and of the devices of some tensors, as they are."""

    __slots__ = ("_cpu", "_devices", "_kind", "_states")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._cpu = torch.get_rng_state()
        # One for each device.
        there = {t.device: t for t in tensors if not (t.is_cpu or t.is_meta)}
        self._kind = next((device.type for device in there), None)
        self._devices: list[int] = []
        self._states: list[torch.Tensor] = []
        if there:
            self._devices, self._states = torch_checkpoint.get_device_states(*there.values())

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Put them back, and afterwards to where they are now."""
        kind = self._kind or "cuda"
        with torch.random.fork_rng(devices=self._devices, device_type=kind):
            torch.set_rng_state(self._cpu)
            if self._devices:
                torch_checkpoint.set_device_states(self._devices, self._states, device_type=kind)
            yield
