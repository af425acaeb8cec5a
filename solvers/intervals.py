"""What every run of ops would keep, need and cost, as a region or outside regions.

Tables over pairs (i, j) of positions, made with two cumulative sums each. For flat regions
they say what the judge says, but for storages that cross a whole segment and for ops that
autograd never reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.replay import Replay
from solvers.step import NOTHING

Table = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Tables indexed ``[i, j]`` for the run of ops ``i <= op < j``.

    Attributes
    ----------
    region_keeps, plain_keeps : array
        Bytes made in the run and alive until backward, if what lies across its end is needed.
    freed : array
        Bytes from before ``i`` that turn out not to be kept when the run is outside regions:
        it is all that reads them, and it does not save them.
    region_needs, region_forward, plain_forward, plain_backward : array
        Peak, fixed bytes included, above what was kept before the run. ``region_needs`` is
        that of forward, replay and backward.
    region_cost : array
        What recomputing the region costs, early stop counted.
    allowed : array of bool
        Whether the run may be a region and saves anything.
    outputs_bytes : int
        What the caller holds; part of every need.
    """

    region_keeps: Table
    plain_keeps: Table
    freed: Table
    region_needs: Table
    region_forward: Table
    plain_forward: Table
    plain_backward: Table
    region_cost: Table
    allowed: NDArray[np.bool_]
    outputs_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Storages:
    """Tracked storages as columns."""

    nbytes: Table
    producer: NDArray[np.intp]
    last_use: NDArray[np.intp]
    first_read: NDArray[np.intp]
    last_read: NDArray[np.intp]
    first_saver: NDArray[np.intp]
    output: NDArray[np.bool_]


def make_intervals(replay: Replay) -> Intervals:
    """Tabulate all runs of a problem's ops: time and memory are quadratic in their number."""
    size = replay.graph.size
    storages = _columns(replay)
    saved = storages.first_saver < size
    states = _random_states(replay)
    far = np.full(len(saved), size + 1, np.intp)
    after_use = np.where(storages.output, size + 1, storages.last_use + 1)
    after_read = storages.last_read + 1
    made = storages.producer
    unheld = np.where(storages.output, 0, storages.nbytes)

    def table(first: NDArray[np.intp], stop: NDArray[np.intp], nbytes: Table) -> Table:
        return _table(size, made, first, stop, nbytes)

    forward = table(made, after_use, storages.nbytes)
    alive = table(made, np.where(saved, far, after_use), storages.nbytes)
    holds = table(np.where(saved, storages.first_saver, far), far, storages.nbytes)
    region_keeps = table(made + 1, after_read, unheld)
    plain_keeps = table(made + 1, np.where(saved, far, after_read), unheld)
    outputs_bytes = int(storages.nbytes[storages.output].sum())
    backward = _backward_needs(replay, holds)
    workspace = np.append(replay.workspace, 0)
    outputs_before = np.zeros(size + 1, np.int64)
    np.add.at(outputs_before, made[storages.output] + 1, storages.nbytes[storages.output])
    base = max(replay.bases) + np.cumsum(outputs_before)[: size + 1, None]
    dropped = np.append(replay.dropped, 0)
    region_forward = _shifted(_running_max(forward[:, : size + 1] + dropped) + base)
    region_needs, region_cost, packs = _regions(replay, alive, backward, outputs_bytes)
    return Intervals(
        region_keeps=region_keeps[:, : size + 1] + states,
        plain_keeps=plain_keeps,
        freed=_freed(size, storages, unheld),
        region_needs=np.maximum(region_needs, region_forward) + 2 * states,
        region_forward=region_forward,
        plain_forward=_shifted(_running_max(alive[:, : size + 1] + workspace) + base),
        plain_backward=_shifted(backward + outputs_bytes),
        region_cost=region_cost,
        allowed=packs & region_edges(replay),
        outputs_bytes=outputs_bytes,
    )


def _columns(replay: Replay) -> _Storages:
    graph = replay.graph
    first_saver = [graph.size] * len(graph.nbytes)
    for op, release in enumerate(graph.release):
        if release is not None:
            for s in graph.saved[op]:
                first_saver[s] = min(first_saver[s], op)
    last_read = list(graph.producer)
    for op, storages in enumerate(graph.reads):
        for s in storages:
            last_read[s] = op
    tracked = [s for s, producer in enumerate(graph.producer) if producer >= 0]
    output = np.zeros(len(graph.nbytes), bool)
    output[list(graph.outputs)] = True
    return _Storages(
        nbytes=np.array([graph.nbytes[s] for s in tracked], np.int64),
        producer=np.array([graph.producer[s] for s in tracked], np.intp),
        last_use=np.array([graph.last_use[s] for s in tracked], np.intp),
        first_read=np.array([graph.first_read[s] for s in tracked], np.intp),
        last_read=np.array([last_read[s] for s in tracked], np.intp),
        first_saver=np.array([first_saver[s] for s in tracked], np.intp),
        output=output[tracked],
    )


def _table(
    size: int,
    made: NDArray[np.intp],
    first: NDArray[np.intp],
    stop: NDArray[np.intp],
    nbytes: Table,
) -> Table:
    """Return ``[i, v]``: bytes made at or after ``i`` that count at ``first <= v < stop``."""
    changes = np.zeros((size + 1, size + 2), np.int64)
    np.add.at(changes, (made, np.minimum(first, size + 1)), nbytes)
    np.add.at(changes, (made, np.minimum(stop, size + 1)), -nbytes)
    np.cumsum(changes, axis=1, out=changes)
    changes[:] = np.cumsum(changes[::-1], axis=0)[::-1]
    return changes


def _running_max(levels: Table) -> Table:
    """Return ``[i, v]``: the most of ``levels[i, u]`` over ``i <= u <= v``."""
    rows, columns = levels.shape
    later = np.arange(columns)[None, :] >= np.arange(rows)[:, None]
    running: Table = np.maximum.accumulate(np.where(later, levels, NOTHING), axis=1)
    return running


def _shifted(levels: Table) -> Table:
    """Turn ``[i, last op]`` into ``[i, stop]``."""
    shifted = np.full_like(levels, NOTHING)
    shifted[:, 1:] = levels[:, :-1]
    return shifted


def _backward_needs(replay: Replay, holds: Table) -> Table:
    """Return ``[i, v]``: the peak of backward over the ops ``i..v`` once all is there."""
    size = replay.graph.size
    instant = np.append(np.maximum(*replay.instant), NOTHING)
    after = np.append(np.maximum(*replay.after), NOTHING)
    before = np.zeros_like(holds[:, : size + 1])
    before[:, 1:] = holds[:, :size]
    return _running_max(np.maximum(holds[:, : size + 1] + instant, before + after))


def _regions(
    replay: Replay, alive: Table, backward: Table, outputs_bytes: int
) -> tuple[Table, Table, NDArray[np.bool_]]:
    """Return needs in backward and costs of regions, and whether they save anything."""
    graph, ops = replay.graph, replay.problem.ops
    size = graph.size
    running = _running_max(alive[:, : size + 1] + np.append(replay.workspace, 0))
    needs = np.full((size + 1, size + 1), NOTHING, np.int64)
    costs = np.zeros((size + 1, size + 1), np.int64)
    packs = np.zeros((size + 1, size + 1), bool)
    costs_before = np.cumsum([0, *(op.cost for op in ops)])
    before = np.maximum(*replay.before)
    idle = np.maximum(np.maximum(*replay.instant), np.maximum(*replay.after))
    last = trigger = -1
    tail = NOTHING
    for stop in range(1, size + 1):
        op = stop - 1
        if graph.packs[op]:
            last, tail = op, NOTHING
            trigger = op if graph.reached[op] else trigger
        else:
            tail = max(tail, int(idle[op]))
        if last < 0:
            continue
        own = set(graph.produced[last]) & set(graph.saved[last])
        runs = ops[last].stop_cost > 0 or bool(own)
        until = last if runs else last - 1
        found = before[trigger] if trigger >= 0 else 0
        rows = slice(0, last + 1)
        replayed = running[rows, until] if until >= 0 else np.full(last + 1, NOTHING)
        needs[rows, stop] = np.maximum(
            np.maximum(replayed + found, backward[rows, last]) + outputs_bytes,
            tail + outputs_bytes,
        )
        costs[rows, stop] = costs_before[last] - costs_before[rows]
        costs[rows, stop] += ops[last].stop_cost if runs else 0
        packs[rows, stop] = True
    return needs, costs, packs


def _random_states(replay: Replay) -> Table:
    """Return ``[i, j]``: the generator state that the region keeps."""
    random = np.cumsum([0, *(op.random for op in replay.problem.ops)])
    states: Table = np.where(random[:, None] < random[None, :], 1, 0)
    return states * replay.problem.random_state_bytes


def region_edges(replay: Replay) -> NDArray[np.bool_]:
    """Return ``[i, j]``: whether both are allowed edges with no pinned op between."""
    boundary = np.array(replay.problem.boundaries, bool)
    pinned = np.cumsum([0, *(op.pinned for op in replay.problem.ops)])
    same = pinned[:, None] == pinned[None, :]
    return np.triu(same & boundary[:, None] & boundary[None, :], 1)


def _freed(size: int, storages: _Storages, unheld: Table) -> Table:
    passed = (storages.first_read < size) & (storages.first_saver == size)
    nbytes = np.where(passed, unheld, 0)
    changes = np.zeros((size + 2, size + 2), np.int64)
    freed_at = np.minimum(storages.last_read + 1, size + 1)
    np.add.at(changes, (storages.producer + 1, freed_at), nbytes)
    np.add.at(changes, (np.minimum(storages.first_read, size) + 1, freed_at), -nbytes)
    changes = np.cumsum(np.cumsum(changes, axis=0), axis=1)
    return changes[: size + 1, : size + 1]
