"""Regions as ``torch.utils.checkpoint`` runs them: what one holds, and what its replay does.

What a region does to memory above what the rest of the step has alive does not depend on the
rest of the plan. So it is worked out once per region and kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from solvers.judge.graph import Graph
from solvers.judge.idle import Idle, Idling
from solvers.judge.keeping import draws_again, held_for
from solvers.judge.prologue import last_reads
from solvers.plan import Region
from solvers.problem import Problem

Claim = tuple[int, int]
"""When a recomputed instance is let go; the least is the latest.

``(v, height)`` is after the replay, at the backward of op ``v``, of the nested region of that
height (it has read its inputs); ``(v, -1)`` is after the backward of op ``v``.
"""

AFTER_BACKWARD = -1
NEVER: Claim = (-1, AFTER_BACKWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One region, and its replay above the level that the replay finds.

    Attributes
    ----------
    region : Region
    height : int
        0 without children, else one more than the highest child.
    inputs : tuple of int
        Tracked storages from before the region that it reads, or its prologue, and those that
        the ops it keeps have made.
    packs_inputs : bool
        Whether it has any input that is not a parameter: a parent's replay counts that as
        something saved.
    trigger : int or None
        The highest op whose backward makes it replay.
    release : int or None
        After which op's backward it lets go of everything: the lowest op in it that autograd
        saved something for; -1 for never, None where that is already the case after forward.
    graph_end : int
        The last forward op at which it still holds its inputs, if ``release`` is None.
    claims : dict of int to Claim
        When it and the regions in it let go of storages it replays, or of its inputs.
    random : bool
        Whether it saves and restores random state.
    cost, flops, ops : int
        What its own replay runs, children in it included.
    stop, partial : int, int or None
        The op before which a replay ends, and the op it runs a part of, if any.
    idle : frozenset of int
        Its ops, those of regions inside it included, that its replay need not run.
    kept : tuple of int
        Its ops that a replay does not run and whose results are held.
    levels : tuple of (int, int)
        Op and bytes at each instant of its replay.
    held : tuple of int
        Replayed storages that are alive when the replay has ended.
    """

    region: Region
    height: int
    children: tuple[Frame, ...]
    inputs: tuple[int, ...]
    packs_inputs: bool
    trigger: int | None
    release: int | None
    graph_end: int
    claims: dict[int, Claim]
    random: bool
    cost: int
    flops: int
    ops: int
    stop: int
    partial: int | None
    idle: frozenset[int]
    kept: tuple[int, ...]
    levels: tuple[tuple[int, int], ...]
    held: tuple[int, ...]

    def walk(self) -> list[Frame]:
        """Return this frame and all inside it, outer ones first."""
        frames = [self]
        for child in self.children:
            frames += child.walk()
        return frames


class Frames:
    """Make and keep the frames of a problem's regions."""

    def __init__(self, problem: Problem, graph: Graph) -> None:
        self.problem = problem
        self.graph = graph
        self.read_last = last_reads(problem)
        self.idling = Idling(problem, graph)
        self._frames: dict[Region, Frame] = {}

    def __call__(self, region: Region) -> Frame:
        """Return the frame of ``region``; time is linear in its ops on the first call."""
        frame = self._frames.get(region)
        if frame is None:
            frame = self._frames[region] = self._make(region)
        return frame

    def _make(self, region: Region) -> Frame:
        graph = self.graph
        children = tuple(self(child) for child in region.children)
        direct = _direct_ops(region)
        packing = [i for i in direct if graph.packs[i]]
        height = 1 + max((child.height for child in children), default=-1)
        claims = _claims(graph, packing, children)
        idle = self._idle(region, packing, children)
        stop, partial = self._replay_end(packing, children, idle)
        levels, held = self._replay(region, children, claims, stop, partial, idle)
        cost, flops, count = self._run_cost(region, stop, partial, idle)
        live = [r for i in packing if (r := graph.release[i]) is not None]
        live += [child.release for child in children if child.release is not None]
        triggers = [i for i in packing if graph.reached[i]]
        triggers += [c.trigger for c in children if c.packs_inputs and c.trigger is not None]
        inside = range(region.start, region.stop)
        ends = [graph.graph_end[i] for i in packing] + [child.graph_end for child in children]
        return Frame(
            region=region,
            height=height,
            children=children,
            inputs=self._inputs(region, idle.kept),
            packs_inputs=any(graph.earliest_input[i] < region.start for i in inside),
            trigger=max(triggers, default=None),
            release=min(live, default=None),
            graph_end=max(ends, default=region.start),
            claims=claims,
            random=draws_again(region, self.problem),
            cost=cost,
            flops=flops,
            ops=count,
            stop=stop,
            partial=partial,
            idle=idle.ops,
            kept=idle.kept,
            levels=levels,
            held=held,
        )

    def _idle(self, region: Region, packing: list[int], children: tuple[Frame, ...]) -> Idle:
        called = (child.region.start for child in children if child.packs_inputs)
        return self.idling(region, max((*packing[-1:], *called), default=-1))

    def _replay_end(
        self, packing: list[int], children: tuple[Frame, ...], idle: Idle
    ) -> tuple[int, int | None]:
        """Return the op before which a replay ends, and the op it runs a part of, if any."""
        last_op = packing[-1] if packing else -1
        last_child = max((c.region.start for c in children if c.packs_inputs), default=-1)
        if last_child > last_op:
            return last_child, None
        if last_op < 0:
            return 0, None
        made_and_saved = set(self.graph.produced[last_op]) & set(self.graph.saved[last_op])
        runs = self.problem.ops[last_op].stop_cost > 0 or bool(made_and_saved)
        return last_op, last_op if runs and last_op not in idle else None

    def _replay(
        self,
        region: Region,
        children: tuple[Frame, ...],
        claims: dict[int, Claim],
        stop: int,
        partial: int | None,
        idle: Idle,
    ) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        graph, ops = self.graph, self.problem.ops
        nbytes = graph.nbytes
        stretch = stretched(children)
        state = self.problem.random_state_bytes
        level = state if draws_again(region, self.problem) else 0
        state_changes = self._state_changes(children) if children and state else {}
        # The state is saved even where not one op runs before the replay ends.
        levels = [(region.start, level)] if level else []
        held: list[int] = []
        dying: dict[int, int] = {}
        if region.prologue:
            level = self._run_prologue(region, claims, stop, level, levels, held, dying)
        dropped = {i for child in children for i in range(child.region.start, child.region.stop)}
        for i in range(region.start, stop if partial is None else partial + 1):
            level += state_changes.get(i, 0)
            if i in idle:
                levels.append((i, level))
                level -= dying.pop(i, 0)
                continue
            before = level + sum(nbytes[s] for s in graph.copied[i])
            for s in (*graph.copied[i], *graph.produced[i]):
                level += nbytes[s]
                if s in claims:
                    held.append(s)
                    continue
                end = max(i, graph.last_use[s], stretch.get(s, -1))
                if end < stop:
                    dying[end] = dying.get(end, 0) + nbytes[s]
            if i == partial and ops[i].stop_peak_bytes:
                levels.append((i, before + ops[i].stop_peak_bytes))
            else:
                op = ops[i]
                nested = i in dropped
                workspace = op.workspace_in_region_bytes if nested else op.forward_workspace_bytes
                levels.append((i, level + workspace))
            level -= dying.pop(i, 0)
        if state and any(c.region.start == stop and c.random for c in children):
            # The call at which the replay ends saves its random state before its inputs.
            levels.append((stop, level + state))
        return tuple(levels), tuple(held)

    def _state_changes(self, children: tuple[Frame, ...]) -> dict[int, int]:
        """Return the random states that nested regions save when a replay calls them.

        The graph of the replay holds them, unless the region has nothing in that graph.
        """
        changes: dict[int, int] = {}
        state = self.problem.random_state_bytes
        for frame in (f for child in children for f in child.walk() if f.random):
            start, stop = frame.region.start, frame.region.stop
            changes[start] = changes.get(start, 0) + state
            if not any(self.graph.packs[start:stop]):
                changes[stop] = changes.get(stop, 0) - state
        return changes

    def _run_prologue(
        self,
        region: Region,
        claims: dict[int, Claim],
        stop: int,
        level: int,
        levels: list[tuple[int, int]],
        held: list[int],
        dying: dict[int, int],
    ) -> int:
        """Run what comes before the region's own ops, without grad; return the level after it."""
        graph, ops = self.graph, self.problem.ops
        last: dict[int, int] = {}
        for i in (*region.prologue, *range(region.start, region.stop)):
            last.update((self.problem.values[v].storage, i) for v in ops[i].inputs)
        # A view that the region returns lives until its replay ends.
        for i in range(region.start, region.stop):
            for v in ops[i].outputs:
                if self.read_last[v] >= region.stop:
                    last[self.problem.values[v].storage] = region.stop
        for i in region.prologue:
            for s in graph.produced[i]:
                level += graph.nbytes[s]
                if s in claims:
                    held.append(s)
                elif (end := last.get(s, i)) < stop:
                    dying[end] = dying.get(end, 0) + graph.nbytes[s]
            levels.append((i, level + ops[i].workspace_in_region_bytes))
            level -= dying.pop(i, 0)
        return level

    def _inputs(self, region: Region, kept: tuple[int, ...]) -> tuple[int, ...]:
        found = self._held_inputs(region) if region.prologue else _inputs(self.graph, region)
        held = (s for i in kept for s in held_for(self.problem, i))
        return tuple(dict.fromkeys((*found, *held)))

    def _held_inputs(self, region: Region) -> tuple[int, ...]:
        """Return what a region with a prologue holds: all that is read and not made again."""
        graph, problem = self.graph, self.problem
        again = set(region.prologue)
        found: dict[int, None] = {}
        for i in (*region.prologue, *range(region.start, region.stop)):
            read = [problem.values[v].storage for v in problem.ops[i].inputs]
            for s in (*read, *(graph.saved[i] if i >= region.start else ())):
                if 0 <= graph.producer[s] < region.start and graph.producer[s] not in again:
                    found[s] = None
        return tuple(found)

    def _run_cost(
        self, region: Region, stop: int, partial: int | None, idle: Idle
    ) -> tuple[int, int, int]:
        inside = (i for i in range(region.start, stop) if i not in idle)
        ran = [self.problem.ops[i] for i in (*region.prologue, *inside)]
        cost = self.problem.region_cost + sum(op.cost for op in ran)
        flops = sum(op.flops for op in ran)
        if partial is None:
            return cost, flops, len(ran)
        op = self.problem.ops[partial]
        return cost + op.stop_cost, flops + op.stop_flops, len(ran) + 1


def _direct_ops(region: Region) -> list[int]:
    """Return the ops of a region that are in none of its children."""
    ops: list[int] = []
    position = region.start
    for child in region.children:
        ops += range(position, child.start)
        position = child.stop
    return ops + list(range(position, region.stop))


def _inputs(graph: Graph, region: Region) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for i in range(region.start, region.stop):
        for s in graph.reads[i]:
            if graph.producer[s] < region.start:
                found[s] = None
    return tuple(found)


def _claims(graph: Graph, packing: list[int], children: tuple[Frame, ...]) -> dict[int, Claim]:
    claims: dict[int, Claim] = {}
    for child in children:
        if child.release is None:
            continue
        read = NEVER if child.trigger is None else (child.trigger, child.height)
        for s in child.inputs:
            claim = min(read, child.claims.get(s, read))
            claims[s] = min(claim, claims.get(s, claim))
    for i in packing:
        release = graph.release[i]
        if release is not None:
            for s in (*graph.saved[i], *graph.copied[i]):
                claim = (release, AFTER_BACKWARD)
                claims[s] = min(claim, claims.get(s, claim))
    return claims


def stretched(frames: tuple[Frame, ...]) -> dict[int, int]:
    """Return until when inputs of these regions live because a call holds its arguments."""
    ends: dict[int, int] = {}
    for frame in frames:
        for s in frame.inputs:
            ends[s] = max(ends.get(s, -1), frame.region.stop - 1)
        for s, end in stretched(frame.children).items():
            ends[s] = max(ends.get(s, -1), end)
    return ends
