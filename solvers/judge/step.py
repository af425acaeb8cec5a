"""Levels of memory over one step, and what stands out in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from solvers.judge.frames import Frame
from solvers.prediction import Phase

if TYPE_CHECKING:
    from solvers.judge.replay import Replay

Levels = NDArray[np.int64]

NOTHING = -(1 << 60)
"""Level of an instant that does not happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Bytes that a region adds during backward, per op of it, above what is kept.

    ``replay`` is the most during the replays that an op's turn brings about, ``instant`` while
    its backward runs, ``after`` when that has let go of what was saved, and ``lasting`` from
    then on to the end of the step. ``replays`` lists them in order, each with the level that
    it finds. ``inputs`` are the storages that are kept for its replay, ``releases`` the op whose
    backward lets go of each.
    """

    frame: Frame
    inputs: NDArray[np.intp]
    releases: NDArray[np.intp]
    replay: Levels
    instant: Levels
    after: Levels
    lasting: int
    cost: int
    flops: int
    ops: int
    replays: tuple[tuple[int, Frame], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Levels of one step, gradients and fixed bytes aside; those come from the judge."""

    judge: Replay
    profiles: list[Profile]
    kept_bytes: int
    forward: Levels
    replay: Levels
    instant: Levels
    after: Levels

    def peak(self) -> int:
        """Return the highest level of all, fixed bytes included."""
        judge = self.judge
        top = int(self.forward.max(initial=0)) + max(judge.bases)
        levels = (self.replay, self.instant, self.after)
        for level, gradients in zip(levels, judge.highest, strict=True):
            top = max(top, int((level + gradients).max(initial=0)))
        return top

    def backward(self, mode: int) -> tuple[Levels, Levels, Levels]:
        """Return the levels of replays, of backward and after it; gradients resident or fresh."""
        judge = self.judge
        return (
            self.replay + judge.before[mode],
            self.instant + judge.instant[mode],
            self.after + judge.after[mode],
        )

    def tops(self, mode: int) -> list[tuple[int, Phase, int]]:
        """Return the highest level of every phase, with its op."""
        if not len(self.forward):
            return [(self.judge.bases[mode], "forward", 0)]
        found: list[tuple[int, Phase, int]] = []
        forward = self.forward + self.judge.bases[mode]
        phases: tuple[Phase, ...] = ("forward", "recompute", "backward", "backward")
        for phase, levels in zip(phases, (forward, *self.backward(mode)), strict=True):
            op = int(levels.argmax())
            found.append((int(levels[op]), phase, op))
        # The op at the top of a replay is inside the region whose turn it is.
        top, _, trigger = found[1]
        if top > 0:
            found[1] = (top, "recompute", self._replayed_op(trigger))
        return found

    def _replayed_op(self, trigger: int) -> int:
        """Return the op that runs at the highest instant of the replays at ``trigger``."""
        candidates = [entry for entry in self._replays(trigger) if entry[1]]
        _, levels = max(candidates, key=lambda entry: entry[0] + max(at for _, at in entry[1]))
        return max(levels, key=lambda entry: entry[1])[0]

    def _replays(self, trigger: int) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """Return level found and levels above it of the replays at ``trigger``."""
        return [
            (level, frame.levels)
            for profile in self.profiles
            for level, frame in profile.replays
            if frame.trigger == trigger
        ]

    def timeline(self) -> tuple[tuple[Phase, int, int], ...]:
        """Return every instant of the step with gradients resident."""
        judge = self.judge
        base = judge.bases[0]
        events: list[tuple[Phase, int, int]] = [
            ("forward", op, int(level) + base) for op, level in enumerate(self.forward)
        ]
        _, instant, after = self.backward(0)
        for op in range(judge.graph.size - 1, -1, -1):
            if not judge.graph.reached[op]:
                continue
            found = judge.before[0][op] + self.instant[op] - self._own(op)
            for level, levels in self._replays(op):
                events += [("recompute", inner, int(found) + level + at) for inner, at in levels]
            events.append(("backward", op, int(instant[op])))
            events.append(("backward", op, int(after[op])))
        return tuple(events)

    def _own(self, op: int) -> int:
        """Return what the region around ``op`` adds at the instant of its backward."""
        for profile in self.profiles:
            region = profile.frame.region
            if region.start <= op < region.stop:
                return int(profile.instant[op - region.start])
        return 0
