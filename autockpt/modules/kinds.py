"""Kinds of steps: which modules a forward calls, as far as memory depends on it.

A forward that branches by itself calls other modules from step to step, at one and the same shape
of the batch. What it called is written down while it runs, and known afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from autockpt.reports.layers import layer_pattern

if TYPE_CHECKING:
    from autockpt.modules.run import Regions

_WITHOUT_GRAD = -1
_FORGOTTEN, _REGION, _HELD = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What one forward holds for backward, under given regions.

    Attributes
    ----------
    calls : tuple of (str, int)
        In order, the place of each module that was called (its path, indices of layers left
        open), and how much is held of it: nothing, as it ran without grad; what it was given, as
        it is in a region; or all.
    given_bytes : int
        Of the tensors that modules were called with, which tells crops from crops.
    """

    calls: tuple[tuple[str, int], ...]
    given_bytes: int

    def covers(self, other: Kind) -> bool:
        """Whether another forward is this one with calls left out, or with less held of them.

        Its peak is no higher then, as far as layers of one place are alike.
        """
        if other.given_bytes > self.given_bytes:
            return False
        # What is left of these calls once each of the other's so far was met among them, in order.
        rest = iter(self.calls)
        return all(
            any(place == own and held <= most for own, most in rest) for place, held in other.calls
        )


@dataclass(slots=True)
class Trail:
    """The calls of modules in one forward, as they are made.

    Attributes
    ----------
    made : list of (str, int, int)
        Path, how often it was called with grad before, and in how many calls this one lies.
    given_bytes : int
        As in ``Kind``.
    """

    made: list[tuple[str, int, int]] = field(default_factory=list)
    given_bytes: int = 0
    _depth: int = field(default=0, compare=False)

    def enter(self, path: str, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note a call with grad that begins."""
        self.made.append((path, number, self._depth))
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                self.given_bytes += value.numel() * value.element_size()
        self._depth += 1

    def leave(self) -> None:
        """Note that the call is over which began last."""
        self._depth -= 1

    def without_grad(self, path: str) -> None:
        """Note a call of which nothing is held."""
        self.made.append((path, _WITHOUT_GRAD, self._depth))

    def kind(self, regions: Regions) -> Kind:
        """Say what is held of these calls under a plan."""
        calls: list[tuple[str, int]] = []
        region: int | None = None
        for path, number, depth in self.made:
            if region is not None and depth <= region:
                region = None
            if number == _WITHOUT_GRAD:
                held = _FORGOTTEN
            elif region is not None:
                held = _REGION
            elif regions.holds(path, number):
                held, region = _REGION, depth
            else:
                held = _HELD
            calls.append((layer_pattern(path), held))
        return Kind(calls=tuple(calls), given_bytes=self.given_bytes)
