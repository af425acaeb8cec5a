"""Storages that are cheap to make again, and the ops that make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from solvers.judge.graph import defining_ops
from solvers.judge.prologue import repeatable_ops
from solvers.judge.replay import Replay

_MOST_OPS = 6


@dataclass(frozen=True, slots=True)
class Slice:
    """How a storage is made again: ops, and the storages that they read."""

    ops: frozenset[int]
    leaves: frozenset[int]


_known: WeakKeyDictionary[Replay, dict[int, Slice]] = WeakKeyDictionary()


def slices_of(replay: Replay) -> Mapping[int, Slice]:
    """Return how storages are made again that cost no more a byte than the whole forward does.

    At most six ops each: those that take the views that others read come with them. A storage
    that is read at once is left out, as what reads it is a region with what makes it.
    """
    found = _known.get(replay)
    if found is None:
        found = _known[replay] = _slices(replay)
    return found


def _slices(replay: Replay) -> dict[int, Slice]:
    problem, graph = replay.problem, replay.graph
    room = replay.plain_room
    allowed, definers = repeatable_ops(problem), defining_ops(problem)
    last = {s: i for i in range(graph.size) for s in graph.reads[i]}
    found: dict[int, Slice] = {}
    for storage in sorted(last):
        producer = graph.producer[storage]
        if producer < 0 or storage in graph.outputs or last[storage] - producer < 2:
            continue
        made = _ops_behind(replay, producer, allowed, definers)
        if made is None:
            continue
        cost = sum(problem.ops[i].cost for i in made.ops)
        if cost * room <= graph.nbytes[storage] * replay.forward_cost:
            found[storage] = made
    return found


def _ops_behind(
    replay: Replay, producer: int, allowed: frozenset[int], definers: list[int]
) -> Slice | None:
    """Return an op with those that take the views that it reads, if all may run again."""
    problem, graph = replay.problem, replay.graph
    ops: set[int] = set()
    leaves: set[int] = set()
    pending = [producer]
    while pending:
        i = pending.pop()
        if i not in allowed or len(ops) == _MOST_OPS:
            return None
        ops.add(i)
        for v in problem.ops[i].inputs:
            s = problem.values[v].storage
            if graph.producer[s] < 0:
                continue
            if graph.producer[s] != definers[v]:
                pending.append(definers[v])
            else:
                leaves.add(s)
    return Slice(frozenset(ops), frozenset(leaves))
