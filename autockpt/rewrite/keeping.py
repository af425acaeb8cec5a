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

from autockpt.rewrite.remade import rooted

__all__ = ["keeper"]

_HOOKS: Any = torch._C._autograd
_Run = Callable[[], Any]
_View = tuple[int, torch.Size, tuple[int, ...], int]


def keeper() -> Callable[..., torch.Tensor]:
    """Give what runs the kept ops of one call of a region: ``keep(number, run, *arguments)``.

    A compiler decides itself what it holds: there the ops are run.
    """
    if torch.compiler.is_compiling():
        return lambda number, run, *arguments: run()
    return _Keeper()


class _Keeper:
    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def __call__(self, number: int, run: _Run, *arguments: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(number)
        if kept is None:
            kept = self._kept[number] = _Kept(arguments)
            return kept.run(run)
        return kept.again(arguments)


class _Kept:
    """One op: what it packed in forward, and its result."""

    __slots__ = ("_arguments", "_packed", "_requires_grad", "_result")

    _result: torch.Tensor
    _requires_grad: bool

    def __init__(self, arguments: tuple[torch.Tensor, ...]) -> None:
        self._arguments = {_storage(argument): i for i, argument in enumerate(arguments)}
        self._packed: list[torch.Tensor | _View] = []

    def run(self, run: _Run) -> torch.Tensor:
        hooks = _HOOKS._top_saved_tensors_default_hooks(True)
        if hooks is None:
            result: torch.Tensor = run()
        else:
            pack, unpack = hooks

            def noting(tensor: torch.Tensor) -> Any:
                self._note(tensor)
                return pack(tensor)

            _HOOKS._push_saved_tensors_default_hooks(noting, unpack)
            try:
                result = run()
            finally:
                _HOOKS._pop_saved_tensors_default_hooks()
        self._result, self._requires_grad = result.detach(), result.requires_grad
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        number = self._arguments.get(_storage(tensor))
        if number is None:
            self._packed.append(tensor.detach())
        else:
            offset = int(tensor.storage_offset())
            self._packed.append((number, tensor.shape, tensor.stride(), offset))

    def again(self, arguments: tuple[torch.Tensor, ...]) -> torch.Tensor:
        hooks = _HOOKS._top_saved_tensors_default_hooks(True)
        with torch.no_grad():
            for entry in self._packed:
                if isinstance(entry, torch.Tensor):
                    tensor = entry
                else:
                    number, size, stride, offset = entry
                    tensor = arguments[number].detach().as_strided(size, stride, offset)
                # Ends the recomputation where this was the last tensor.
                hooks[0](tensor)
        (result,) = rooted((self._result,), [self._requires_grad])
        return result


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
