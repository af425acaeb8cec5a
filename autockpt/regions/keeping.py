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
from autockpt.regions.remade import rooted
from autockpt.regions.surroundings import Layout, laid_out

__all__ = ["keeper", "kept", "replays", "skipped"]

_is_alias_of: Any = torch._C._is_alias_of  # type: ignore[attr-defined]
_Run = Callable[[], Any]
_Pack = Callable[[torch.Tensor], Any]
_View = tuple[int, torch.Size, tuple[int, ...], int, Layout]


def keeper() -> Any:
    """Give what holds the kept ops of one call of a region.

    A compiler decides itself what it holds: there the ops are run.
    """
    return None if torch.compiler.is_compiling() else Keeper()


def replays(keep: Any) -> bool:
    """Tell a region whether it runs again."""
    return keep is not None and keep.pack is not None


def kept(keep: Any, number: int, run: _Run, *arguments: torch.Tensor) -> Any:
    """Run an op that is kept, or give the result of its forward and pack what it packed."""
    return run() if keep is None else keep(number, run, arguments, True)


def skipped(keep: Any, number: int, run: _Run, *arguments: torch.Tensor, results: int = 1) -> Any:
    """Run an op or a region, or where no recomputation needs its results, pack what it packed."""
    if keep is None:
        return run()
    result = keep(number, run, arguments, False)
    return (None,) * results if result is None and results > 1 else result


class Keeper:
    """What one call of a region keeps.

    Attributes
    ----------
    running : Kept or None
        In forward: the op that runs, to be told of each tensor that is saved.
    pack : callable or None
        In a recomputation: takes the tensors that are saved, in their order.
    """

    __slots__ = ("_kept", "pack", "running")

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}
        self.running: Kept | None = None
        self.pack: _Pack | None = None

    def hand_to(self, pack: _Pack | None) -> _Pack | None:
        """Begin a recomputation that takes saved tensors, or end it; give who took them before."""
        before, self.pack = self.pack, pack
        return before

    def __call__(
        self, number: int, run: _Run, arguments: tuple[torch.Tensor, ...], held: bool
    ) -> Any:
        if self.pack is not None:
            found = self._kept[number]
            found.hand_over(arguments, self.pack)
            return found.result() if held else None
        self.running = op = self._kept[number] = Kept(arguments)
        try:
            result = run()
        finally:
            self.running = None
            op.ran()
        if held:
            op.hold(result)
        return result


class Kept:
    """One op: what it saved in forward, and its result."""

    __slots__ = ("_arguments", "_packed", "_requires_grad", "_result", "_versions")

    _result: torch.Tensor
    _requires_grad: bool

    def __init__(self, arguments: tuple[torch.Tensor, ...]) -> None:
        self._arguments = arguments
        self._packed: list[torch.Tensor | _View] = []
        self._versions: list[tuple[torch.Tensor, int]] = []

    def ran(self) -> None:
        """Let go of the arguments: a recomputation has them again."""
        self._arguments = ()

    def hold(self, result: torch.Tensor) -> None:
        """Keep the result for ``result``."""
        self._result, self._requires_grad = result.detach(), result.requires_grad
        self._versions.append((self._result, version(self._result)))

    def note(self, tensor: torch.Tensor) -> None:
        """Write down which tensor is saved: a view of an argument, or one of its own, held."""
        for number, argument in enumerate(self._arguments):
            if _is_view(tensor, argument):
                offset = int(tensor.storage_offset())
                layout = argument.stride(), int(argument.storage_offset())
                self._packed.append((number, tensor.shape, tensor.stride(), offset, layout))
                return
        held = tensor.detach()
        self._packed.append(held)
        self._versions.append((held, version(held)))

    def hand_over(self, arguments: tuple[torch.Tensor, ...], pack: _Pack) -> None:
        """Pack what was saved in forward, in the same order."""
        for held, then in self._versions:
            if version(held) != then:
                raise RecomputationError(
                    "What a region keeps to run again has been modified by an inplace operation "
                    "since its forward. Write to a clone, or call backward first."
                )
        for entry in self._packed:
            if isinstance(entry, torch.Tensor):
                pack(entry)
                continue
            number, size, stride, offset, layout = entry
            argument = laid_out(arguments[number].detach(), layout)
            # Ends the recomputation where this was the last tensor.
            pack(argument.as_strided(size, stride, offset))

    def result(self) -> torch.Tensor:
        """Give the result of forward, at the root of a graph of its own."""
        (result,) = rooted((self._result,), [self._requires_grad])
        return result


def _is_view(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are views of each other by size, stride and offset alone."""
    return (
        tensor.layout is torch.strided
        and other.layout is torch.strided
        and _is_alias_of(tensor, other)
        and tensor.dtype is other.dtype
        and tensor.is_conj() == other.is_conj()
        and tensor.is_neg() == other.is_neg()
    )
