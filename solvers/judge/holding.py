"""What is alive at the peak: which storages, and on whose account.

``simulate`` says how high the peak is. This module names what it is made of, storage by
storage, without the tables that ``simulate`` adds up: the two must agree to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from solvers.judge.frames import AFTER_BACKWARD, NEVER, Claim, Frame, stretched
from solvers.judge.graph import Graph
from solvers.judge.replay import Replay, replay_of
from solvers.judge.step import Step
from solvers.judge.wellformed import check_plan
from solvers.plan import Plan
from solvers.prediction import Phase
from solvers.problem import Problem

Why = Literal["saved", "region input", "recomputed", "output", "in use", "random state", "copy"]
"""Why a storage is alive.

Saved by autograd for an op's backward; kept as the input of a region; made again by the
replay of a region; held by the caller; read again later in the same pass; the state of the
random generator that a region keeps; copies of what is written, see ``Problem.forward_bytes``.
"""

Reason = tuple[Why, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One allocation that is alive.

    Attributes
    ----------
    storage : int or None
        Its number in the problem; None for a random state and for copies.
    nbytes : int
    why : str
        The strongest reason, in the order of ``Why``.
    by : tuple of int
        The ops that it is alive for: those that saved it, or the first of the region.
    """

    storage: int | None
    nbytes: int
    why: Why
    by: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One instant of a step, taken apart. All parts add up to ``level_bytes``.

    Attributes
    ----------
    level_bytes : int
        All that is alive, fixed bytes included.
    phase : {"forward", "backward", "recompute"}
    op : int
        The op that runs.
    resident : bool
        Whether gradients are resident in the step that is looked at, or fresh.
    fixed_bytes : int
        There at the start of the step.
    number_bytes : int
        ``Problem.number_bytes``.
    gradient_bytes : int
        Gradients in flight, and fresh ones that are finished.
    workspace_bytes : int
        What the running op needs for itself; negative where it frees what it hid before all
        of its gradients are there.
    held : tuple of Held
        Everything else, in the order in which it was made.
    """

    level_bytes: int
    phase: Phase
    op: int
    resident: bool
    fixed_bytes: int
    number_bytes: int
    gradient_bytes: int
    workspace_bytes: int
    held: tuple[Held, ...]


def alive_at_peak(problem: Problem, plan: Plan) -> Holding:
    """Return what is alive at the predicted peak of ``problem`` under ``plan``.

    Parameters
    ----------
    problem : Problem
    plan : Plan

    Raises
    ------
    PlanError
        If the plan is malformed or made for another problem.

    Notes
    -----
    Exact: fixed bytes, numbers, gradients, workspace and all that is held add up to
    ``simulate(problem, plan).peak_bytes``. Linear in the size of the problem.

    Examples
    --------
    >>> from solvers.problem import Gradient, Op, Storage, Value
    >>> square = Op(
    ...     name="square",
    ...     inputs=(0,),
    ...     outputs=(1,),
    ...     saved=(0, 1),
    ...     packs=True,
    ...     gradient_bytes=(8,),
    ...     gradients=(Gradient(value=0, source=0),),
    ... )
    >>> problem = Problem(
    ...     ops=(square,),
    ...     values=(Value(storage=0, gradient_bytes=8), Value(storage=1, gradient_bytes=8)),
    ...     storages=(Storage(nbytes=8), Storage(nbytes=8, producer=0)),
    ...     outputs=(),
    ...     loss=1,
    ...     boundaries=(True, True),
    ... )
    >>> holding = alive_at_peak(problem, Plan())
    >>> holding.phase, holding.gradient_bytes, [held.why for held in holding.held]
    ('backward', 16, ['saved'])
    """
    check_plan(plan, problem)
    judge = replay_of(problem)
    step = judge.add_up(plan.regions)
    tops = [max(top for top, _, _ in step.tops(mode)) for mode in (0, 1)]
    mode = 0 if tops[0] >= tops[1] else 1
    return _Instant(judge, step, mode).take_apart(tops[mode])


class _Instant:
    """The highest instant of a step, with gradients resident (mode 0) or fresh (1)."""

    def __init__(self, judge: Replay, step: Step, mode: int) -> None:
        self.judge, self.step, self.mode = judge, step, mode
        self.problem, self.graph = judge.problem, judge.graph
        self.frames = [profile.frame for profile in step.profiles]
        self.outside = set(range(self.graph.size))
        for frame in self.frames:
            self.outside.difference_update(range(frame.region.start, frame.region.stop))

    def take_apart(self, top: int) -> Holding:
        base = self.judge.bases[self.mode]
        if not self.graph.size:
            return self._holding(top, "forward", 0, 0, 0, ())
        forward = self.step.forward + base
        if int(forward.max()) == top:
            op = int(forward.argmax())
            running = self.problem.ops[op]
            whole = op in self.outside or any(op in f.kept for f in self.frames)
            room = running.forward_workspace_bytes if whole else running.workspace_in_region_bytes
            return self._holding(top, "forward", op, 0, room, self._forward(op))
        replay, instant, after = self.step.backward(self.mode)
        if int(replay.max()) == top:
            return self._recompute(top, int(replay.argmax()))
        if int(instant.max()) == top:
            op = int(instant.argmax())
            workspace = self.judge.resident.workspace[op]
            gradients = int(self.judge.instant[self.mode][op]) - base - workspace
            held = (*self._kept(op), *self._replayed(op))
            return self._holding(top, "backward", op, gradients, workspace, held)
        op = int(after.argmax())
        gradients = int(self.judge.after[self.mode][op]) - base
        held = (*self._kept(op - 1), *self._replayed(op, done=True))
        return self._holding(top, "backward", op, gradients, 0, held)

    def _holding(
        self,
        top: int,
        phase: Phase,
        op: int,
        gradients: int,
        workspace: int,
        held: Iterable[Held],
    ) -> Holding:
        return Holding(
            level_bytes=top,
            phase=phase,
            op=op,
            resident=self.mode == 0,
            fixed_bytes=self.judge.bases[self.mode] - self.judge.problem.number_bytes,
            number_bytes=self.judge.problem.number_bytes,
            gradient_bytes=gradients,
            workspace_bytes=workspace,
            held=tuple(held),
        )

    # Forward

    def _forward(self, op: int) -> Iterator[Held]:
        graph = self.graph
        reasons = self._reasons(graph.size)
        ends = self._lengthened()
        for s, producer in enumerate(graph.producer):
            if not 0 <= producer <= op:
                continue
            why, by = reasons.get(s, ("in use", ()))
            by = tuple(i for i in by if i <= op)
            if why in ("saved", "region input") and not by:
                why = "in use"  # whoever will keep it has not run yet
            if s in reasons or max(graph.last_use[s], ends.get(s, -1)) >= op:
                yield Held(storage=s, nbytes=graph.nbytes[s], why=why, by=by)
        if self.problem.forward_bytes:
            yield Held(storage=None, nbytes=self.problem.forward_bytes, why="copy")
        for frame in self._random_frames():
            end = graph.size
            if frame.release is None:
                end = max(frame.graph_end, frame.region.stop - 1)
            if frame.region.start <= op <= end:
                yield self._state(frame)

    def _lengthened(self) -> dict[int, int]:
        """Return until when storages that backward does not need are held in forward."""
        graph = self.graph
        ends: dict[int, int] = {}

        def hold(storages: Iterable[int], end: int) -> None:
            for s in storages:
                ends[s] = max(end, ends.get(s, -1))

        for frame in self.frames:
            if frame.release is None:
                hold(frame.inputs, max(frame.graph_end, frame.region.stop - 1))
            for s, end in stretched(frame.children).items():
                hold((s,), end)
        for i in self.outside:
            if graph.packs[i] and graph.release[i] is None:
                hold(graph.saved[i], graph.graph_end[i])
        return ends

    # Backward

    def _reasons(self, op: int) -> dict[int, Reason]:
        """Return what forward keeps that is let go of after the backward of ``op`` or below."""
        graph = self.graph
        reasons: dict[int, Reason] = dict.fromkeys(graph.outputs, ("output", ()))
        for frame in self.frames:
            if frame.release is not None and frame.release <= op:
                for s in frame.inputs:
                    _, by = reasons.get(s, ("output", ()))
                    reasons[s] = ("region input", (*by, frame.region.start))
        saved: dict[int, tuple[int, ...]] = {}
        for i in sorted(self.outside):
            release = graph.release[i]
            if release is not None and release <= op:
                for s in graph.saved[i]:
                    saved[s] = (*saved.get(s, ()), i)
        reasons.update((s, ("saved", by)) for s, by in saved.items())
        return reasons

    def _kept(self, op: int) -> Iterator[Held]:
        """Yield what forward left and the backward of ``op`` and of earlier ops needs."""
        reasons = self._reasons(op)
        for s in sorted(reasons):
            why, by = reasons[s]
            yield Held(storage=s, nbytes=self.graph.nbytes[s], why=why, by=by)
        for frame in self._random_frames():
            if frame.release is not None and frame.release <= op:
                yield self._state(frame)

    def _replayed(self, op: int, *, done: bool = False) -> Iterator[Held]:
        """Yield what replays have made and backward has not yet let go of."""
        for profile in self.step.profiles:
            if profile.frame.region.stop <= op:
                continue
            for _, frame in profile.replays:
                if frame.trigger is not None and frame.trigger >= op:
                    yield from self._instances(frame, (op, AFTER_BACKWARD - done))

    def _instances(self, frame: Frame, now: Claim) -> Iterator[Held]:
        """Yield what a frame has replayed and at ``now`` holds: claims fall as time goes on."""
        for s in frame.held:
            if frame.claims[s] <= now:
                by = tuple(i for i in _packing(self.graph, frame) if self._keeps(i, s))
                nbytes = self.graph.nbytes[s]
                yield Held(storage=s, nbytes=nbytes, why="recomputed", by=by)

    def _keeps(self, op: int, storage: int) -> bool:
        return storage in self.graph.saved[op] or storage in self.graph.copied[op]

    # Replays

    def _recompute(self, top: int, trigger: int) -> Holding:
        base = self.judge.bases[self.mode]
        gradients = int(self.judge.before[self.mode][trigger]) - base
        (profile,) = (
            p for p in self.step.profiles if p.frame.region.start <= trigger < p.frame.region.stop
        )
        frames = [frame for _, frame in profile.replays if frame.trigger == trigger]
        found = {id(frame): level for level, frame in profile.replays}
        running = max(
            (frame for frame in frames if frame.levels),
            key=lambda frame: found[id(frame)] + max(at for _, at in frame.levels),
        )
        position = max(range(len(running.levels)), key=lambda k: running.levels[k][1])
        op, level = running.levels[position]
        inside = tuple(self._inside(running, position))
        earlier = self._before_replay(profile.replays, running, trigger)
        held = (*self._kept(trigger), *earlier, *inside)
        workspace = level - sum(entry.nbytes for entry in inside)
        return self._holding(top, "recompute", op, gradients, workspace, held)

    def _before_replay(
        self, replays: tuple[tuple[int, Frame], ...], running: Frame, trigger: int
    ) -> Iterator[Held]:
        """Yield what earlier replays hold when ``running`` starts at the turn of ``trigger``."""
        for profile in self.step.profiles:
            if profile.frame.region.start > trigger:
                for _, frame in profile.replays:
                    yield from self._instances(frame, NEVER)
        for _, frame in replays:
            if frame is running:
                return
            if frame.trigger is None or frame.trigger < trigger:
                continue
            # Regions that were replayed in this turn have let go of their inputs.
            yield from self._instances(frame, (trigger, running.height))

    def _inside(self, frame: Frame, position: int) -> Iterator[Held]:
        """Yield what a replay has alive at one of its instants."""
        graph, region = self.graph, frame.region
        at = frame.levels[position][0]
        final = position == len(frame.levels) - 1 and at == frame.stop and frame.partial is None
        partly = at == frame.partial and bool(self.problem.ops[at].stop_peak_bytes)
        last = at - 1 if final or partly else at
        stretch = stretched(frame.children)
        gone = frame.idle.union(frame.kept)
        for i in (i for i in range(region.start, last + 1) if i not in gone):
            for s in (*graph.copied[i], *graph.produced[i]):
                end = max(i, graph.last_use[s], stretch.get(s, -1))
                if s in frame.claims or end >= at:
                    yield Held(storage=s, nbytes=graph.nbytes[s], why="recomputed", by=(i,))
        state = self.problem.random_state_bytes
        if not state:
            return
        if frame.random:
            yield self._state(frame)
        for child in (f for c in frame.children for f in c.walk() if f.random):
            start, stop = child.region.start, child.region.stop
            # At the call where a replay ends, what begins or ends there has not happened.
            now = at - 1 if final else at
            if start <= now < stop or (start <= now and any(graph.packs[start:stop])):
                yield self._state(child)
        if final and any(c.random and c.region.start == frame.stop for c in frame.children):
            yield self._state(frame)

    # Random states

    def _random_frames(self) -> list[Frame]:
        if not self.problem.random_state_bytes:
            return []
        return [f for frame in self.frames for f in frame.walk() if f.random]

    def _state(self, frame: Frame) -> Held:
        nbytes = self.problem.random_state_bytes
        return Held(storage=None, nbytes=nbytes, why="random state", by=(frame.region.start,))


def _packing(graph: Graph, frame: Frame) -> list[int]:
    """Return the ops of a region, those in regions inside it aside, that save something."""
    inner = {i for c in frame.children for i in range(c.region.start, c.region.stop)}
    inside = range(frame.region.start, frame.region.stop)
    return [i for i in inside if i not in inner and graph.packs[i]]
