"""What the replays of all short runs of ops take and cost, where some ops are kept.

The tables of ``intervals`` say what a run keeps. This says what its replay brings back: only what
backward wants, as far as a run of ops without regions inside goes exactly what the judge says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.judge.keeping import held_for
from solvers.judge.replay import Replay
from solvers.judge.step import NOTHING

Row = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Of the regions that end with one op that saves something: columns by where they start.

    Attributes
    ----------
    low : int
        Where the first of them starts.
    runs : array of bool
        Whether the first op of the region has to run again, so that it does not start too early.
    held, hidden : array
        Bytes held of kept ops, and of these what nobody reads after the region.
    needs : array
        Peak of replay and backward, fixed bytes included, above what was kept before the region,
        the caller's aside.
    costs : array
    """

    low: int
    runs: NDArray[np.bool_]
    held: Row
    hidden: Row
    needs: Row
    costs: Row


class Replays:
    """Replays of the runs in a window of ops, at most ``reach`` ops long, that keep ``kept``."""

    def __init__(
        self, replay: Replay, low: int, high: int, kept: frozenset[int] = frozenset()
    ) -> None:
        graph, ops = replay.graph, replay.problem.ops
        self.replay, self.low = replay, low
        self.kept = np.array([i in kept for i in range(low, high)], bool)
        self.needed = replay.frames.idling.table(low, high, kept)
        own = {i: held_for(replay.problem, i) for i in kept if low <= i < high}
        self.held_bytes = np.zeros(high - low, np.int64)
        self.held_until = np.full(high - low, -1, np.intp)
        self.held_result = np.zeros(high - low, np.int64)
        for i, storages in own.items():
            read = [s for s in storages if graph.last_use[s] > i]
            self.held_bytes[i - low] = sum(graph.nbytes[s] for s in storages)
            self.held_result[i - low] = sum(graph.nbytes[s] for s in read)
            self.held_until[i - low] = max((graph.last_use[s] for s in read), default=-1)
        first_saver = [graph.size] * len(graph.nbytes)
        for i in range(graph.size - 1, -1, -1):
            if graph.release[i] is not None:
                for s in graph.saved[i]:
                    first_saver[s] = i
        made = [s for i in range(low, high) if i not in kept for s in graph.produced[i]]
        self.made = np.array([graph.producer[s] - low for s in made], np.intp)
        self.nbytes = np.array([graph.nbytes[s] for s in made], np.int64)
        self.last_use = np.array([graph.last_use[s] - low for s in made], np.intp)
        self.first_saver = np.array([first_saver[s] - low for s in made], np.intp)
        self.costs = np.array([op.cost for op in ops[low:high]], np.int64)
        self.workspace = replay.workspace[low:high]
        self.before = np.maximum(*replay.before)[low:high]
        self.instant = np.maximum(*replay.instant)[low:high]
        self.after = np.maximum(*replay.after)[low:high]

    def ending(self, last: int, trigger: int, reach: int) -> Replayed:
        """Return the replays of the regions whose last op that saves something is ``last``.

        ``trigger`` is the last op in them that backward reaches and that saves something.
        """
        graph, op = self.replay.graph, self.replay.problem.ops[last]
        t = last - self.low
        first = max(0, t + 1 - reach)
        rows = slice(first, t + 1)
        own = set(graph.produced[last]) & set(graph.saved[last])
        again = self.needed[rows, t] & ~self.kept[rows]
        runs = bool((op.stop_cost > 0 or own) and again[-1])
        costs = np.where(again, self.costs[rows], 0)
        costs[-1] = op.stop_cost if runs else 0
        keeps = self.needed[rows, t] & self.kept[rows]
        held = np.where(keeps, self.held_bytes[rows], 0)
        read = np.where(keeps & (self.held_until[rows] > last), self.held_result[rows], 0)
        levels = self._levels(first, t, again)
        until = t + 1 - first if runs else t - first
        replayed = levels[:, :until] + np.where(again, self.workspace[rows], 0)[:until]
        top = _most(replayed) + (self.before[trigger - self.low] if trigger >= self.low else 0)
        needs = np.maximum(top, self._backward(first, t)) + _from(held)
        return Replayed(
            low=self.low + first,
            runs=again,
            held=_from(held),
            hidden=_from(held - read),
            needs=needs,
            costs=_from(costs) + self.replay.problem.region_cost,
        )

    def kept_until(self, low: int, last: int) -> NDArray[np.intp]:
        """Return what regions that end with ``last`` hold, rising: each what lies in it."""
        rows = slice(low - self.low, last + 1 - self.low)
        keeps = self.needed[rows, last - self.low] & self.kept[rows]
        return low + np.flatnonzero(keeps)

    def _levels(self, first: int, t: int, again: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return ``[i, u]``: bytes made by a replay from ``i`` that are alive at op ``u``."""
        at = np.flatnonzero((self.made >= first) & (self.made <= t))
        at = at[again[self.made[at] - first]]
        made = self.made[at] - first
        claimed = self.first_saver[at] <= t
        end = np.where(claimed, t, np.minimum(self.last_use[at], t)) + 1 - first
        return _sums(t + 1 - first, made, made, end, self.nbytes[at])

    def _backward(self, first: int, t: int) -> Row:
        """Return, by start, the peak of the region's backward, once all is there."""
        at = np.flatnonzero((self.made >= first) & (self.first_saver <= t))
        made, since = self.made[at] - first, self.first_saver[at] - first
        holds = _sums(t + 1 - first, made, since, np.full(len(at), t + 1 - first), self.nbytes[at])
        earlier = np.zeros_like(holds)
        earlier[:, 1:] = holds[:, :-1]
        rows = slice(first, t + 1)
        return _most(np.maximum(holds + self.instant[rows], earlier + self.after[rows]))


def _sums(
    size: int, made: NDArray[np.intp], first: NDArray[np.intp], stop: NDArray[np.intp], nbytes: Row
) -> NDArray[np.int64]:
    """Return ``[i, v]``: bytes made at or after ``i`` that count at ``first <= v < stop``."""
    changes = np.zeros((size, size + 1), np.int64)
    np.add.at(changes, (made, first), nbytes)
    np.add.at(changes, (made, stop), -nbytes)
    np.cumsum(changes, axis=1, out=changes)
    sums: NDArray[np.int64] = np.cumsum(changes[::-1], axis=0)[::-1, :size]
    return sums


def _most(levels: NDArray[np.int64]) -> Row:
    """Return, by start ``i``, the most of ``levels[i, v]`` over ``v >= i``."""
    rows, columns = levels.shape
    later = np.arange(columns)[None, :] >= np.arange(rows)[:, None]
    most: Row = np.where(later, levels, NOTHING).max(axis=1, initial=NOTHING)
    return most


def _from(values: Row) -> Row:
    """Return the sums from each position on."""
    sums: Row = np.cumsum(values[::-1])[::-1]
    return sums
