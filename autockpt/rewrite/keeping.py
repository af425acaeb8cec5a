"""Ops in a region that run once: what they made is held, and a recomputation takes it from there.

A recomputation has to hand ``checkpoint`` the tensors that the region saved in forward, in the
same order. For an op that is kept, forward writes down which these were: a view of one of its
arguments, which the recomputation has made again, or something of its own, which is held. Then
nothing of the op has to run: its tensors are packed from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autockpt.capture.calls import version
from autockpt.errors import RecomputationError
from autockpt.rewrite.remade import rooted

__all__ = ["keeper", "kept", "replays", "skipped"]

_HOOKS: Any = torch._C._autograd
_Run = Callable[[], Any]
_View = tuple[int, torch.Size, tuple[int, ...], int]
_Layout = tuple[tuple[int, ...], int]


def keeper() -> Any:
    """Give what holds the kept ops of one call of a region.

    A compiler decides itself what it holds: there the ops are run.
    """
    return None if torch.compiler.is_compiling() else _Keeper()


def replays(keep: Any) -> bool:
    """Tell a region, which asks once whenever it begins, whether it runs again."""
    return keep is not None and keep.replays()


def kept(keep: Any, number: int, run: _Run, *arguments: torch.Tensor) -> Any:
    """Run an op that is kept, or give the result of its forward and pack what it packed."""
    return run() if keep is None else keep(number, run, *arguments)


def skipped(keep: Any, number: int, run: _Run, *arguments: torch.Tensor, results: int = 1) -> Any:
    """Run an op or a region, or where no recomputation needs its results, pack what it packed."""
    if keep is None:
        return run()
    result = keep(number, run, *arguments, held=False)
    return (None,) * results if result is None and results > 1 else result


class _Keeper:
    __slots__ = ("_began", "_kept")

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._began = False

    def replays(self) -> bool:
        began, self._began = self._began, True
        return began

    def __call__(self, number: int, run: _Run, *arguments: torch.Tensor, held: bool = True) -> Any:
        found = self._kept.get(number)
        if found is None:
            found = self._kept[number] = _Kept(arguments)
            result = found.run(run)
            if held:
                found.hold(result)
            return result
        found.pack(arguments)
        return found.result() if held else None


class _Kept:
    """One op: what it packed in forward, and its result."""

    __slots__ = ("_arguments", "_layouts", "_packed", "_requires_grad", "_result", "_versions")

    _result: torch.Tensor
    _requires_grad: bool

    def __init__(self, arguments: tuple[torch.Tensor, ...]) -> None:
        kinds = ((_kind(argument), i) for i, argument in enumerate(arguments))
        self._arguments = {kind: i for kind, i in kinds if kind is not None}
        self._layouts = [_layout(argument) for argument in arguments]
        self._packed: list[torch.Tensor | _View] = []
        self._versions: list[tuple[torch.Tensor, int]] = []

    def run(self, run: _Run) -> Any:
        hooks = _HOOKS._top_saved_tensors_default_hooks(True)
        if hooks is None:
            return run()
        pack, unpack = hooks

        def noting(tensor: torch.Tensor) -> Any:
            self._note(tensor)
            return pack(tensor)

        _HOOKS._push_saved_tensors_default_hooks(noting, unpack)
        try:
            return run()
        finally:
            _HOOKS._pop_saved_tensors_default_hooks()

    def hold(self, result: torch.Tensor) -> None:
        """Keep the result for ``result``."""
        self._result, self._requires_grad = result.detach(), result.requires_grad
        self._versions.append((self._result, version(self._result)))

    def _hold(self, tensor: torch.Tensor) -> None:
        held = tensor.detach()
        self._packed.append(held)
        self._versions.append((held, version(held)))

    def _note(self, tensor: torch.Tensor) -> None:
        kind = _kind(tensor)
        number = None if kind is None else self._arguments.get(kind)
        if number is None:
            self._hold(tensor)
        else:
            offset = int(tensor.storage_offset())
            self._packed.append((number, tensor.shape, tensor.stride(), offset))

    def pack(self, arguments: tuple[torch.Tensor, ...]) -> None:
        """Pack what was packed in forward, in the same order."""
        if any(version(held) != then for held, then in self._versions):
            raise RecomputationError(
                "What a region keeps to run again has been modified by an inplace operation since "
                "its forward. Write to a clone, or call backward first."
            )
        hooks = _HOOKS._top_saved_tensors_default_hooks(True)
        with torch.no_grad():
            for entry in self._packed:
                if isinstance(entry, torch.Tensor):
                    tensor = entry
                else:
                    number, size, stride, offset = entry
                    argument = _laid_out(arguments[number].detach(), self._layouts[number])
                    tensor = argument.as_strided(size, stride, offset)
                # Ends the recomputation where this was the last tensor.
                hooks[0](tensor)

    def result(self) -> torch.Tensor:
        """Give the result of forward, at the root of a graph of its own."""
        (result,) = rooted((self._result,), [self._requires_grad])
        return result


def _layout(tensor: torch.Tensor) -> _Layout | None:
    if tensor.layout is not torch.strided:
        return None
    return tensor.stride(), int(tensor.storage_offset())


def _laid_out(tensor: torch.Tensor, layout: _Layout | None) -> torch.Tensor:
    """Give a tensor as it lay in forward: hooks around the step may give it back otherwise."""
    if layout is None or _layout(tensor) == layout:
        return tensor
    strides, offset = layout
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    room = tensor.new_empty(max(0, offset + reach + 1) if tensor.numel() else 0)
    # What is expanded is one element.
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    room.as_strided(tensor.shape, strides, offset)[once].copy_(tensor[once])
    return room


def _kind(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Tell tensors that are views of each other by size, stride and offset alone."""
    if tensor.layout is not torch.strided:
        return None
    storage = int(tensor.untyped_storage()._cdata)
    return storage, tensor.dtype, tensor.is_conj(), tensor.is_neg()
