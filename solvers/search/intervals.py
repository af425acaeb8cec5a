"""What every run of ops would keep, need and cost, as a region or outside regions.

Tables over pairs (i, j) of positions, made with two cumulative sums each. For flat regions
they say what the judge says, but for storages that cross a whole segment and for ops that
autograd never reaches. Of problems of thousands of ops only runs up to a length are tabulated,
window by window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.judge.replay import Replay
from solvers.judge.step import NOTHING

Table = NDArray[np.int64]

_WHOLE_OPS = 1200
_REACH = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Tables indexed ``[i, j - i]`` for the run of ops ``i <= op < j``, ``j - i <= reach``.

    Attributes
    ----------
    reach : int
        Ops of the longest run in the tables.
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
    crossing : array
        Per position, bytes made before it that are read after it, or held.
    """

    reach: int
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
    crossing: Table


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
    saved: NDArray[np.bool_]


def make_intervals(replay: Replay) -> Intervals:
    """Tabulate runs of a problem's ops.

    Notes
    -----
    All runs, in time and memory quadratic in the number of ops, up to 1200 ops; of longer
    problems the runs of at most 320 ops, linear in the number of ops.
    """
    size = replay.graph.size
    reach = size if size <= _WHOLE_OPS else _REACH
    storages = _columns(replay)
    parts = [
        _window(replay, storages, low, min(size, low + 2 * reach), min(reach, size - low), reach)
        for low in range(0, max(size, 1), max(reach, 1))
    ]
    # Position ``size`` starts no run; its row makes the tables square.
    tables = {name: _joined([part[name] for part in parts]) for name in parts[0]}
    return Intervals(
        reach=reach,
        allowed=tables.pop("allowed").astype(bool),
        outputs_bytes=int(storages.nbytes[storages.output].sum()),
        crossing=_crossing(size, storages),
        **tables,
    )


def _joined(parts: list[Table]) -> Table:
    rows = np.concatenate(parts)
    return np.concatenate([rows, np.zeros_like(rows[:1])])


def _window(
    replay: Replay, storages: _Storages, low: int, high: int, rows: int, reach: int
) -> dict[str, Table]:
    """Return the tables of the runs that start at one of ``rows`` ops from ``low`` on.

    Nothing made before a run counts, so ops outside ``low <= op < high`` do not matter.
    """
    size = high - low
    inside = (storages.producer >= low) & (storages.producer < high)
    nbytes, made = storages.nbytes[inside], storages.producer[inside] - low
    output, saved = storages.output[inside], storages.saved[inside]
    far = np.full(len(made), size + 1, np.intp)
    after_use = np.where(output, size + 1, storages.last_use[inside] + 1 - low)
    after_read = storages.last_read[inside] + 1 - low
    unheld = np.where(output, 0, nbytes)

    def table(first: NDArray[np.intp], stop: NDArray[np.intp], nbytes: Table) -> Table:
        return _table(size, made, first, stop, nbytes)

    forward = table(made, after_use, nbytes)
    alive = table(made, np.where(saved, far, after_use), nbytes)
    holds = table(np.where(saved, storages.first_saver[inside] - low, far), far, nbytes)
    states = _random_states(replay, low, high)
    outputs_bytes = int(storages.nbytes[storages.output].sum())
    backward = _backward_needs(replay, holds, low, high)
    workspace = np.append(replay.workspace[low:high], 0)
    outputs_before = np.zeros(replay.graph.size + 1, np.int64)
    held = storages.producer[storages.output] + 1
    np.add.at(outputs_before, held, storages.nbytes[storages.output])
    there = max(replay.bases) + replay.problem.forward_bytes
    base = there + np.cumsum(outputs_before)[low : high + 1, None]
    dropped = np.append(replay.dropped[low:high], 0)
    region_forward = _shifted(_running_max(forward[:, : size + 1] + dropped) + base)
    region_needs, region_cost, packs = _regions(replay, alive, backward, low, outputs_bytes)
    tables = {
        "region_keeps": table(made + 1, after_read, unheld)[:, : size + 1] + states,
        "plain_keeps": table(made + 1, np.where(saved, far, after_read), unheld)[:, : size + 1],
        "freed": _freed(size, storages, low),
        "region_needs": np.maximum(region_needs, region_forward) + 2 * states,
        "region_forward": region_forward,
        "plain_forward": _shifted(_running_max(alive[:, : size + 1] + workspace) + base),
        "plain_backward": _shifted(backward + outputs_bytes),
        "region_cost": region_cost,
        "allowed": (packs & region_edges(replay, low, high)).astype(np.int64),
    }
    start = np.arange(rows)[:, None]
    stop = np.minimum(start + np.arange(reach + 1)[None, :], size)
    return {name: table[start, stop] for name, table in tables.items()}


def _crossing(size: int, storages: _Storages) -> Table:
    changes = np.zeros(size + 2, np.int64)
    np.add.at(changes, storages.producer + 1, storages.nbytes)
    ends = np.where(storages.output, size, storages.last_read) + 1
    np.add.at(changes, ends, -storages.nbytes)
    crossing: Table = np.cumsum(changes)[: size + 1]
    return crossing


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
        saved=np.array([first_saver[s] < graph.size for s in tracked], bool),
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


def _backward_needs(replay: Replay, holds: Table, low: int, high: int) -> Table:
    """Return ``[i, v]``: the peak of backward over the ops ``i..v`` once all is there."""
    size = high - low
    instant = np.append(np.maximum(*replay.instant)[low:high], NOTHING)
    after = np.append(np.maximum(*replay.after)[low:high], NOTHING)
    before = np.zeros_like(holds[:, : size + 1])
    before[:, 1:] = holds[:, :size]
    return _running_max(np.maximum(holds[:, : size + 1] + instant, before + after))


def _regions(
    replay: Replay, alive: Table, backward: Table, low: int, outputs_bytes: int
) -> tuple[Table, Table, NDArray[np.bool_]]:
    """Return needs in backward and costs of regions, and whether they save anything."""
    graph, problem = replay.graph, replay.problem
    size = len(alive) - 1
    ops = problem.ops[low : low + size]
    packing, reached = graph.packs[low : low + size], graph.reached[low : low + size]
    running = _running_max(alive[:, : size + 1] + np.append(replay.workspace[low : low + size], 0))
    needs = np.full((size + 1, size + 1), NOTHING, np.int64)
    costs = np.zeros((size + 1, size + 1), np.int64)
    packs = np.zeros((size + 1, size + 1), bool)
    op_costs = np.array([op.cost for op in ops], np.int64)
    runs_again = replay.frames.idling.table(low, low + size)
    before = np.maximum(*replay.before)[low : low + size]
    idle = np.maximum(np.maximum(*replay.instant), np.maximum(*replay.after))[low : low + size]
    last = trigger = -1
    tail = NOTHING
    for stop in range(1, size + 1):
        op = stop - 1
        if packing[op]:
            last, tail = op, NOTHING
            trigger = op if reached[op] else trigger
        else:
            tail = max(tail, int(idle[op]))
        if last < 0:
            continue
        own = set(graph.produced[low + last]) & set(graph.saved[low + last])
        runs = bool((ops[last].stop_cost > 0 or own) and runs_again[last, last])
        until = last if runs else last - 1
        found = before[trigger] if trigger >= 0 else 0
        rows = slice(0, last + 1)
        replayed = running[rows, until] if until >= 0 else np.full(last + 1, NOTHING)
        needs[rows, stop] = np.maximum(
            np.maximum(replayed + found, backward[rows, last]) + outputs_bytes,
            tail + outputs_bytes,
        )
        again = op_costs[:last] * runs_again[:last, last]
        costs[:last, stop] = np.cumsum(again[::-1])[::-1]
        costs[rows, stop] += problem.region_cost
        costs[rows, stop] += ops[last].stop_cost if runs else 0
        packs[rows, stop] = True
    return needs, costs, packs


def _random_states(replay: Replay, low: int, high: int) -> Table:
    """Return ``[i, j]``: the generator state that the region keeps."""
    random = np.cumsum([0, *(op.random for op in replay.problem.ops[low:high])])
    states: Table = np.where(random[:, None] < random[None, :], 1, 0)
    return states * replay.problem.random_state_bytes


def region_edges(replay: Replay, low: int = 0, high: int | None = None) -> NDArray[np.bool_]:
    """Return ``[i, j]``: whether both are allowed edges with no pinned op between."""
    high = replay.graph.size if high is None else high
    boundary = np.array(replay.problem.boundaries[low : high + 1], bool)
    pinned = np.cumsum([0, *(op.pinned for op in replay.problem.ops[low:high])])
    same = pinned[:, None] == pinned[None, :]
    return np.triu(same & boundary[:, None] & boundary[None, :], 1)


def _freed(size: int, storages: _Storages, low: int) -> Table:
    """Return ``[i, j]``: what is read between them only, made before and not saved."""
    passed = ~storages.saved & ~storages.output & (storages.first_read >= low)
    passed &= (storages.last_read > storages.producer) & (storages.producer < low + size)
    nbytes = storages.nbytes[passed]
    made = np.maximum(storages.producer[passed] + 1 - low, 0)
    read = np.minimum(storages.first_read[passed] + 1 - low, size + 1)
    freed_at = np.minimum(storages.last_read[passed] + 1 - low, size + 1)
    changes = np.zeros((size + 2, size + 2), np.int64)
    np.add.at(changes, (made, freed_at), nbytes)
    np.add.at(changes, (read, freed_at), -nbytes)
    changes = np.cumsum(np.cumsum(changes, axis=0), axis=1)
    return changes[: size + 1, : size + 1]
