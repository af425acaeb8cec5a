"""The program behind ``checkmate``: which op runs again at whose turn, and what is alive when."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pulp

from solvers.judge.replay import Replay
from solvers.programs import proven_bound
from solvers.search.local import WITHOUT_END, Deadline

_SLACK = 1e-6
Presence = dict[int, pulp.LpVariable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A way to run an op again.

    Attributes
    ----------
    op : int
    reads, makes : tuple of int
        Items: a storage, or ``~op`` for the copies that a partial run makes for its own
        backward. What the caller holds is left out, it is always there.
    cost : int
    extra_bytes : int
        Most bytes alive while it runs above items that are, its own included; may be negative.
    """

    op: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    cost: int
    extra_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The turn of one op, forward or backward.

    Attributes
    ----------
    op : int
    backward : bool
    level_bytes : int
        What is alive besides items while other ops run again before it.
    own_bytes, after_bytes : int, int or None
        The same while it runs itself, and while its gradients are handed on.
    wanted : tuple of tuple of int
        Of each tuple one item must be alive while it runs.
    useful : frozenset of int
        Items that may be wanted from here on, for themselves or to make others.
    """

    op: int
    backward: bool
    level_bytes: int
    own_bytes: int
    after_bytes: int | None
    wanted: tuple[tuple[int, ...], ...]
    useful: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A problem as the program sees it: tasks in program order, turns in the order of the step."""

    nbytes: dict[int, int]
    firsts: tuple[Task, ...]
    tasks: tuple[Task, ...]
    turns: tuple[Turn, ...]
    loss_bytes: int


def make_step(replay: Replay) -> Step:
    """List what can run again, and the turns of a step, with what is alive at each."""
    graph, ops = replay.graph, replay.problem.ops
    outputs = set(graph.outputs)
    nbytes = {
        s: graph.nbytes[s]
        for s, producer in enumerate(graph.producer)
        if producer >= 0 and s not in outputs
    }
    firsts, tasks = [], []
    for i, op in enumerate(ops):
        reads = tuple(s for s in graph.reads[i] if s not in outputs)
        makes = tuple(s for s in graph.produced[i] if s not in outputs)
        workspace = min(op.forward_workspace_bytes, op.workspace_in_region_bytes)
        first = Task(op=i, reads=reads, makes=makes, cost=op.cost, extra_bytes=workspace)
        firsts.append(first)
        if makes:
            tasks.append(first)
        own = [s for s in makes if s in graph.saved[i]]
        whole_bytes = workspace + sum(nbytes[s] for s in makes)
        top = op.stop_peak_bytes or whole_bytes
        if own and graph.reached[i] and (op.stop_cost < op.cost or top < whole_bytes):
            nbytes[~i] = sum(nbytes[s] for s in own)
            extra = min(top, whole_bytes) - nbytes[~i]
            tasks.append(Task(op=i, reads=reads, makes=(~i,), cost=op.stop_cost, extra_bytes=extra))
    items = frozenset(nbytes)
    seed = replay.problem.values[replay.problem.loss].gradient_bytes
    return Step(
        nbytes=nbytes,
        firsts=tuple(firsts),
        tasks=tuple(tasks),
        turns=(*_forward_turns(replay, firsts, items), *_backward_turns(replay, firsts, items)),
        loss_bytes=max(replay.bases) + sum(graph.nbytes[s] for s in outputs) + seed,
    )


def _forward_turns(replay: Replay, firsts: list[Task], items: frozenset[int]) -> list[Turn]:
    graph = replay.graph
    base = max(replay.bases)
    turns = []
    held = 0
    for first in firsts:
        before = held
        held += sum(graph.nbytes[s] for s in graph.produced[first.op] if s in graph.outputs)
        turns.append(
            Turn(
                op=first.op,
                backward=False,
                level_bytes=base + before,
                own_bytes=base + held + first.extra_bytes,
                after_bytes=None,
                wanted=(*((s,) for s in first.reads), *((s,) for s in first.makes)),
                useful=frozenset(s for s in items if _maker(replay, s) < first.op),
            )
        )
    return turns


def _backward_turns(replay: Replay, firsts: list[Task], items: frozenset[int]) -> list[Turn]:
    graph = replay.graph
    held = sum(graph.nbytes[s] for s in graph.outputs)
    reached = [i for i in range(graph.size) if graph.reached[i]]
    needed: set[int] = set()
    useful: dict[int, frozenset[int]] = {}
    for i in reached:
        pending = [s for s in graph.saved[i] if s in items]
        if ~i in items:
            needed.add(~i)
            pending += firsts[i].reads
        while pending:
            s = pending.pop()
            if s not in needed:
                needed.add(s)
                pending += firsts[graph.producer[s]].reads
        useful[i] = frozenset(needed)
    turns = []
    for i in reversed(reached):
        early = max(0, replay.resident.early[i])
        wanted = [
            (s, ~i) if graph.producer[s] == i and ~i in items else (s,)
            for s in graph.saved[i]
            if s in items
        ]
        turns.append(
            Turn(
                op=i,
                backward=True,
                level_bytes=held + max(int(levels[i]) for levels in replay.before) - early,
                own_bytes=held + max(int(levels[i]) for levels in replay.instant),
                after_bytes=held + max(int(levels[i]) for levels in replay.after),
                wanted=tuple(wanted),
                useful=useful[i],
            )
        )
    return turns


def _maker(replay: Replay, item: int) -> int:
    """Return the op that makes an item."""
    return ~item if item < 0 else replay.graph.producer[item]


def _label(item: int) -> str:
    return f"own_{~item}" if item < 0 else str(item)


def _check(deadline: Deadline) -> None:
    if deadline.over():
        raise OutOfTimeError


def cells(step: Step) -> int:
    """Return how many (turn, op that may run again, item) there are: the program's size."""
    total = 0
    for turn in step.turns:
        makers = {task.op for task in step.tasks if task.op < turn.op + turn.backward}
        total += len(makers) * len(turn.useful)
    return total


class OutOfTimeError(RuntimeError):
    """The deadline passed before the program was made."""


class RematProgram:
    """The integer program of one step and budget, or its relaxation.

    Making it takes a while too: past ``deadline`` that ends in ``OutOfTimeError``.

    Attributes
    ----------
    model : pulp.LpProblem
    again : list of (turn, task, variable)
        Whether the task runs at that turn.
    """

    def __init__(
        self,
        step: Step,
        budget_bytes: int,
        *,
        relaxed: bool,
        deadline: Deadline = WITHOUT_END,
    ) -> None:
        self.step = step
        self.budget_bytes = budget_bytes
        self.category = pulp.LpContinuous if relaxed else pulp.LpBinary
        self.model = pulp.LpProblem("checkmate", pulp.LpMinimize)
        self.again: list[tuple[int, Task, pulp.LpVariable]] = []
        self._at_loss: Presence = {}
        self._instants: list[tuple[int, Presence]] = []
        self._rows: list[pulp.LpConstraint] = []
        # Where a task that does not run would make room, its row must not bind.
        self._leeway = max(0, *(-task.extra_bytes for task in (*step.tasks, *step.firsts)), 0)
        self._total = max(1, sum(first.cost for first in step.firsts)) / 1000
        presence: Presence = {}
        for t, turn in enumerate(step.turns):
            _check(deadline)
            if turn.backward and not step.turns[t - 1].backward:
                presence = self._at_loss = self._present("loss", presence, {})
                self._fit(presence, step.loss_bytes, 0)
                self._instants.append((t - 1, presence))
            presence = self._add_turn(t, turn, presence)
        for t, alive in self._instants:
            _check(deadline)
            self._add_totals(t, alive)
        _check(deadline)
        self.model += pulp.lpSum(x * (task.cost / self._total) for _, task, x in self.again)
        for row in self._rows:
            self.model += row

    def _add_turn(self, t: int, turn: Turn, before: Presence) -> Presence:
        presence = {s: x for s, x in before.items() if s in turn.useful}
        for k, task in enumerate(self.step.tasks):
            if task.op >= turn.op + turn.backward:
                break
            if any(s in turn.useful for s in task.makes):
                presence = self._run_again(t, turn, k, task, presence)
        makes = () if turn.backward else self.step.firsts[turn.op].makes
        during = self._present(f"{t}", presence, dict.fromkeys(makes, 1))
        for group in turn.wanted:
            self._rows.append(pulp.lpSum(during[s] for s in group if s in during) >= 1)
        self._fit(during, turn.own_bytes, 0)
        if turn.after_bytes is None:
            return during
        self._instants.append((t, during))
        after = self._present(f"{t}_after", during, {})
        self._fit(after, turn.after_bytes, 0)
        return after

    def _run_again(self, t: int, turn: Turn, k: int, task: Task, presence: Presence) -> Presence:
        x = self.model.add_variable(f"run_{t}_{k}", 0, 1, self.category)
        self.again.append((t, task, x))
        during = self._present(f"{t}_{k}", presence, dict.fromkeys(task.makes, x))
        for s in task.reads:
            # Without a way to be there the op cannot run.
            self._rows.append(x <= during[s] if s in during else x <= 0)
        for s in task.makes:
            self._rows.append(x <= during[s])
        slack = self._leeway
        self._fit(during, turn.level_bytes - slack, (task.extra_bytes + slack) * x)
        return during

    def _add_totals(self, instant: int, alive: Presence) -> None:
        """Say of all turns after an instant what holds of each.

        Whole runs obey that anyway. A relaxation would run a little of an op at each of many
        turns, and have a little of what it reads.
        """
        runs: dict[int, list[pulp.LpVariable]] = {}
        reads: dict[int, tuple[int, ...]] = {}
        for t, task, x in self.again:
            # A whole run serves an op's own backward as well as one that stops early.
            for s in (*task.makes, ~task.op) if t > instant else ():
                if s in self.step.nbytes:
                    runs.setdefault(s, []).append(x)
                    reads[s] = task.reads
        total = {s: self.model.add_variable(f"total_{instant}_{_label(s)}", 0, 1) for s in runs}

        def sources(items: tuple[int, ...]) -> pulp.LpAffineExpression:
            return pulp.lpSum(
                [alive[s] for s in items if s in alive]
                + [total[s] for s in items[-1:] if s in total]
            )

        for s, y in total.items():
            self._rows.append(y <= pulp.lpSum(runs[s]))
            self._rows += [y <= sources((r,)) for r in reads[s]]
        for turn in self.step.turns[instant + 1 :]:
            self._rows += [sources(group) >= 1 for group in turn.wanted]

    def _present(
        self, name: str, before: Presence, made: dict[int, pulp.LpVariable | int]
    ) -> Presence:
        """Return what is alive at the next instant: at most what was, and what is made."""
        during: Presence = {}
        for s in dict.fromkeys((*before, *made)):
            during[s] = self.model.add_variable(f"alive_{name}_{_label(s)}", 0, 1)
            if s in made and not isinstance(made[s], int):
                source = made[s] + before.get(s, 0)
                self._rows.append(during[s] <= source)
            elif s not in made:
                self._rows.append(during[s] <= before[s])
        return during

    def _fit(self, alive: Presence, level: int, extra: pulp.LpAffineExpression | int) -> None:
        scale = max(1, self.budget_bytes)
        level_row = pulp.lpSum(x * (self.step.nbytes[s] / scale) for s, x in alive.items())
        if not isinstance(extra, int):
            level_row += extra * (1 / scale)
        self._rows.append(level_row <= (self.budget_bytes - level) / scale)

    def value(self) -> float:
        """Return the cost of the solution, in the problem's unit."""
        return sum(float(x.value()) * task.cost for _, task, x in self.again)

    def proven_bound(self) -> int | None:
        """Return a cost that the backend has proven to be the least possible, if it says so."""
        found = proven_bound(self.model)
        return None if found is None else math.ceil(found * self._total * (1 - _SLACK) - _SLACK)

    def runs(self) -> tuple[tuple[tuple[int, int], ...], int]:
        """Return (turn, op) of all that runs again, and what it costs."""
        chosen = [(t, task) for t, task, x in self.again if x.value() > 0.5]
        turns = self.step.turns
        pairs = tuple((turns[t].op, task.op) for t, task in chosen)
        return pairs, sum(task.cost for _, task in chosen)

    def kept(self) -> tuple[int, ...]:
        """Return the storages that are alive when backward starts."""
        return tuple(sorted(s for s, x in self._at_loss.items() if s >= 0 and x.value() > 0.5))
