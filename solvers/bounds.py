"""What no schedule can go below, however nested or repeated its recomputations are."""

from __future__ import annotations

import math

import pulp

from solvers.errors import InfeasibleError
from solvers.judge.graph import Graph
from solvers.judge.replay import Replay, replay_of
from solvers.judge.step import NOTHING
from solvers.problem import Problem
from solvers.programs import run_program

_INSTANTS = 16
_SLACK = 1e-6


def peak_bound(problem: Problem) -> int:
    """Return bytes below which no schedule exists, fixed bytes included.

    At every op its inputs, outputs and workspace are alive together; at every backward what
    the op saved and the gradients in flight; at all times what the caller already holds.

    Examples
    --------
    >>> from solvers.problem import Op, Storage, Value
    >>> peak_bound(
    ...     Problem(
    ...         ops=(Op(name="y", inputs=(0,), outputs=(1,)),),
    ...         values=(Value(storage=0), Value(storage=1)),
    ...         storages=(Storage(nbytes=8), Storage(nbytes=4, producer=0)),
    ...         outputs=(1,),
    ...         loss=1,
    ...         boundaries=(True, True),
    ...         batch_bytes=8,
    ...     )
    ... )
    12
    """
    replay = replay_of(problem)
    graph = replay.graph
    base = top = max(replay.bases)
    held = frozenset(graph.outputs)
    for i, op in enumerate(problem.ops):
        alive = {s for s in held if graph.producer[s] < i}
        alive.update(graph.reads[i], graph.produced[i])
        level = sum(graph.nbytes[s] for s in alive)
        level += min(op.forward_workspace_bytes, op.workspace_in_region_bytes)
        top = max(top, base + level)
        for mode in (0, 1):
            if graph.reached[i]:
                level = sum(graph.nbytes[s] for s in held | set(graph.saved[i]))
                top = max(top, int(replay.instant[mode][i]) + level)
                level = sum(graph.nbytes[s] for s in held)
                top = max(top, int(replay.after[mode][i]) + level)
    return top


def bound(problem: Problem, budget_bytes: int) -> int:
    """Return a recompute cost that no schedule can go below at this budget.

    Parameters
    ----------
    problem : Problem
    budget_bytes : int
        Peak, fixed bytes included.

    Returns
    -------
    int
        In the problem's unit of cost.

    Raises
    ------
    InfeasibleError
        If no schedule of any kind fits.

    Notes
    -----
    At an instant of backward only so many bytes are alive; of what the ops still to come saved,
    everything else must be made again, and so must what its producers need and lack. As a
    linear program (a storage is kept, an op runs again, each between 0 and 1) that is a bound;
    the largest over the loss and the instants of backward that leave least room is returned. An
    op whose own saved tensor alone is wanted is charged its ``stop_cost``.
    """
    replay = replay_of(problem)
    least = peak_bound(problem)
    if budget_bytes < least:
        raise InfeasibleError(
            f"No schedule of any kind fits {budget_bytes} bytes: at least {least} are needed.",
            budget_bytes=budget_bytes,
            bound_bytes=least,
        )
    if replay.price(())[0] <= budget_bytes:
        return 0
    found = replay.bounds.get(budget_bytes)
    if found is None:
        found = max(_cost_at(replay, budget_bytes, instant) for instant in _instants(replay))
        replay.bounds[budget_bytes] = found
    return found


def _instants(replay: Replay) -> list[int]:
    """Return the loss and the instants of backward that leave less room than all before them.

    Backward goes on with less to make again, so an instant with no less room than an earlier
    one gives no more. Where there are many, those that take most room are left out last.
    """
    graph = replay.graph
    top = _load(replay, graph.size)
    found = [(top, graph.size)]
    for i in range(graph.size - 1, -1, -1):
        if graph.reached[i] and (load := _load(replay, i)) > top:
            top = load
            found.append((load, i))
    step = -(-len(found) // _INSTANTS)
    return [instant for _, instant in found[::-1][::step]]


def _load(replay: Replay, instant: int) -> int:
    """Return the bytes that are alive at an instant whatever is kept."""
    graph = replay.graph
    alive = set(graph.saved[instant]) if instant < graph.size else set()
    held = alive | set(graph.outputs)
    return _level(replay, instant) + sum(graph.nbytes[s] for s in held)


def _cost_at(replay: Replay, budget_bytes: int, instant: int) -> int:
    """Solve the linear program at the backward of op ``instant``; at the loss if past all."""
    graph, ops = replay.graph, replay.problem.ops
    alive = set(graph.saved[instant]) if instant < graph.size else set()
    room = budget_bytes - _load(replay, instant)
    held = alive | set(graph.outputs)
    if room < 0:
        return 0
    model = pulp.LpProblem("bound", pulp.LpMinimize)
    wanted = _Program(graph, held, model)
    for i in range(min(instant, graph.size)):
        if graph.reached[i] and graph.packs[i]:
            for s in graph.saved[i]:
                wanted.want(s, whole=graph.producer[s] != i)
    cost = pulp.lpSum(
        partly * ops[i].stop_cost + wanted.whole[i] * (ops[i].cost - ops[i].stop_cost)
        for i, partly in wanted.part.items()
    )
    model += cost
    for row in wanted.rows:
        model += row
    scale = max(room, 1)
    model += (
        pulp.lpSum(kept * (graph.nbytes[s] / scale) for s, kept in wanted.kept.items())
        <= room / scale + _SLACK
    )
    run_program(model)
    if model.sol_status != pulp.LpSolutionOptimal or not wanted.part:
        return 0
    least = float(pulp.value(cost)) * (1 - _SLACK)
    return max(0, math.floor(least))


def _level(replay: Replay, instant: int) -> int:
    """Return fixed bytes and gradients at an instant, in the mode that leaves less room."""
    problem = replay.problem
    if instant == replay.graph.size:
        return max(replay.bases) + problem.values[problem.loss].gradient_bytes
    return max(int(levels[instant]) for levels in replay.instant if levels[instant] > NOTHING)


class _Program:
    """Variables and rows of the linear program, made where they are wanted."""

    def __init__(self, graph: Graph, held: set[int], model: pulp.LpProblem) -> None:
        self.graph = graph
        self.held = held
        self.model = model
        self.kept: dict[int, pulp.LpVariable] = {}
        self.part: dict[int, pulp.LpVariable] = {}
        self.whole: dict[int, pulp.LpVariable] = {}
        self.rows: list[pulp.LpConstraint] = []
        self._needed: set[int] = set()

    def want(self, storage: int, *, whole: bool) -> None:
        """Demand that a storage is kept or made again (by a whole run of its producer)."""
        if storage in self.held:
            return
        run = self._run(self.graph.producer[storage], whole)
        self.rows.append(self._keep(storage) + run >= 1)

    def _keep(self, storage: int) -> pulp.LpVariable:
        if storage not in self.kept:
            self.kept[storage] = self.model.add_variable(f"keep_{storage}", 0, 1)
        return self.kept[storage]

    def _run(self, op: int, whole: bool) -> pulp.LpVariable:
        self._add_op(op)
        return self.whole[op] if whole else self.part[op]

    def _add_op(self, op: int) -> None:
        """Add an op that may run again, and all that this may bring with it."""
        pending = [op]
        while pending:
            i = pending.pop()
            if i in self.part:
                continue
            self.part[i] = self.model.add_variable(f"part_{i}", 0, 1)
            self.whole[i] = self.model.add_variable(f"whole_{i}", 0, 1)
            self.rows.append(self.part[i] >= self.whole[i])
            pending += [self.graph.producer[s] for s in self.graph.reads[i] if s not in self.held]
            self._needed.add(i)
        for i in sorted(self._needed):
            for s in self.graph.reads[i]:
                if s not in self.held:
                    source = self.whole[self.graph.producer[s]]
                    self.rows.append(self._keep(s) + source >= self.part[i])
        self._needed.clear()
