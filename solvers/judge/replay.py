"""A problem made ready to be judged under any plan."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from solvers.judge.frames import AFTER_BACKWARD, Frame, Frames, stretched
from solvers.judge.gradients import gradient_flows
from solvers.judge.graph import make_graph
from solvers.judge.keeping import keepable_ops
from solvers.judge.prologue import reads_inside_others
from solvers.judge.step import NOTHING, Levels, Profile, Step
from solvers.plan import Region
from solvers.prediction import Prediction
from solvers.problem import Problem

NEVER_FITS = 1 << 60


class Replay:
    """A problem with everything about it that does not depend on the plan."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.graph = graph = make_graph(problem)
        self.frames = Frames(problem, graph)
        self._profiles: dict[Region, Profile] = {}
        self.forward_cost = problem.forward_cost
        self.resident, self.fresh = gradient_flows(problem, graph)
        reached = np.array(graph.reached, bool)

        def masked(levels: tuple[int, ...]) -> Levels:
            return np.where(reached, np.array(levels, np.int64), NOTHING)

        # The two modes differ by a constant in forward, and by gradients alone in backward.
        resident = problem.fixed_bytes + problem.number_bytes
        base = (resident, resident - problem.gradient_bytes)
        flows = (self.resident, self.fresh)
        self.bases = base
        self.before = [masked(f.before) + b for f, b in zip(flows, base, strict=True)]
        self.instant = [masked(f.instant) + b for f, b in zip(flows, base, strict=True)]
        self.after = [masked(f.after) + b for f, b in zip(flows, base, strict=True)]
        self.nbytes = np.array(graph.nbytes, np.int64)
        self.last_use = np.array(graph.last_use, np.intp)
        self.outputs = np.array(graph.outputs, np.intp)
        self.workspace = np.array([op.forward_workspace_bytes for op in problem.ops], np.int64)
        self.dropped = np.array([op.workspace_in_region_bytes for op in problem.ops], np.int64)
        # Of either mode, for the peak of both.
        self.highest = tuple(np.maximum(*of) for of in (self.before, self.instant, self.after))
        # What no backward wants and yet is saved in forward.
        self._dead = [i for i in range(graph.size) if graph.release[i] is None and graph.packs[i]]
        self.pinned_before = (0, *itertools.accumulate(int(op.pinned) for op in problem.ops))
        self.plain_forward = self._forward_levels()
        self._pairs = self._saved_pairs()
        # Filled by those who search: what they found out about this problem is found once.
        self.searches: dict[int, object] = {}
        self.chain: object = None
        self.least: tuple[Region, ...] | None = None
        self.least_flat: tuple[Region, ...] | None = None
        self.steady: Problem | None = None
        self.worth: list[frozenset[int]] | None = None
        self.bounds: dict[int, int] = {}
        self.keepable = keepable_ops(problem)

    @property
    def plain_room(self) -> int:
        """Bytes that the plain step needs above what is there all along."""
        return self.price(())[0] - self.bases[0]

    def _forward_levels(self) -> Levels:
        """Return the forward levels when nothing is kept, workspaces aside."""
        changes = np.zeros(self.graph.size + 2, np.int64)
        for s, producer in enumerate(self.graph.producer):
            if producer >= 0:
                changes[producer] += self.graph.nbytes[s]
                changes[self.graph.last_use[s] + 1] -= self.graph.nbytes[s]
        return np.cumsum(changes)[: self.graph.size] + self.problem.forward_bytes

    def _saved_pairs(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """Return (op, storage, release) of everything saved that outlives forward."""
        pairs = [
            (i, s, release)
            for i, release in enumerate(self.graph.release)
            if release is not None
            for s in self.graph.saved[i]
        ]
        table = np.array(pairs, np.intp).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]

    def profile(self, region: Region) -> Profile:
        """Return what ``region`` adds during backward; kept after the first call."""
        profile = self._profiles.get(region)
        if profile is None:
            profile = self._profiles[region] = self._make_profile(region)
        return profile

    def _make_profile(self, region: Region) -> Profile:
        frame = self.frames(region)
        inputs = np.array(() if frame.release is None else frame.inputs, np.intp)
        length = region.stop - region.start
        replay = np.full(length, NOTHING, np.int64)
        instant = np.zeros(length, np.int64)
        after = np.zeros(length, np.int64)
        replayed = [f for f in frame.walk() if f.trigger is not None]
        releases: dict[tuple[int, int], int] = {}
        for f in replayed:
            for s in f.held:
                claim = f.claims[s]
                releases[claim] = releases.get(claim, 0) + self.graph.nbytes[s]
        triggered: dict[int, list[Frame]] = {}
        for f in replayed:
            if f.trigger is not None:
                triggered.setdefault(f.trigger, []).append(f)
        level = 0
        replays: list[tuple[int, Frame]] = []
        for i in range(length - 1, -1, -1):
            op = region.start + i
            for f in triggered.get(op, ()):
                replays.append((level, f))
                if f.levels:
                    replay[i] = max(replay[i], level + max(at for _, at in f.levels))
                level += sum(self.graph.nbytes[s] for s in f.held)
                level -= releases.get((op, f.height), 0)
            instant[i] = level
            level -= releases.get((op, AFTER_BACKWARD), 0)
            after[i] = level
        return Profile(
            frame=frame,
            inputs=inputs,
            releases=np.full(len(inputs), frame.release, np.intp),
            replay=replay,
            instant=instant,
            after=after,
            lasting=level,
            cost=sum(f.cost for f in replayed),
            flops=sum(f.flops for f in replayed),
            ops=sum(f.ops for f in replayed),
            replays=tuple(replays),
        )

    def price(self, regions: tuple[Region, ...]) -> tuple[int, int]:
        """Return the peak, fixed bytes included, and the recompute cost; the fast way.

        Regions next to a prologue that reads what lives in them only never fit.
        """
        if any(region.prologue for region in regions) and any(
            reads_inside_others(
                regions, self.problem, self.frames.idling.definers, self.frames.read_last
            )
        ):
            return NEVER_FITS, 0
        step = self.add_up(regions)
        return step.peak(), sum(profile.cost for profile in step.profiles)

    def predict(self, regions: tuple[Region, ...], *, timeline: bool = False) -> Prediction:
        """Return the whole prediction for well-formed ``regions``."""
        step = self.add_up(regions)
        tops = [step.tops(mode) for mode in (0, 1)]
        resident, fresh = (max(top for top, _, _ in mode) for mode in tops)
        peak, phase, op = max(
            tops[0 if resident >= fresh else 1], key=lambda entry: (entry[0], -entry[2])
        )
        return Prediction(
            peak_bytes=peak,
            resident_peak_bytes=resident,
            fresh_peak_bytes=fresh,
            activation_peak_bytes=resident - self.problem.fixed_bytes,
            peak_op=op,
            peak_phase=phase,
            kept_bytes=step.kept_bytes,
            recompute_cost=sum(p.cost for p in step.profiles),
            recompute_flops=sum(p.flops for p in step.profiles),
            recomputed_ops=sum(p.ops for p in step.profiles),
            forward_cost=self.forward_cost,
            timeline=step.timeline() if timeline else (),
        )

    def add_up(self, regions: tuple[Region, ...]) -> Step:
        """Return the levels of the whole step."""
        size = self.graph.size
        profiles = [self.profile(region) for region in regions]
        outside, whole = np.ones(size, bool), np.zeros(size, bool)
        states = np.zeros(size + 2, np.int64)
        forward = np.zeros(size + 2, np.int64)
        for p in profiles:
            region = p.frame.region
            outside[region.start : region.stop] = False
            if p.frame.kept:
                whole[list(p.frame.kept)] = True
            if p.frame.random and self.problem.random_state_bytes:
                self._hold_states(p.frame, forward, states)
        released = self._released(profiles, outside)
        held = np.flatnonzero(released < size)
        np.add.at(states, released[held] + 1, self.nbytes[held])
        np.add.at(forward, np.minimum(self.last_use[held] + 1, size), self.nbytes[held])
        self._stretch(profiles, outside, released, forward)
        replay = np.full(size, NOTHING, np.int64)
        instant = np.zeros(size, np.int64)
        after = np.zeros(size, np.int64)
        if profiles:
            # In program order, and no two of them overlap.
            inside = ~outside
            replay[inside] = np.concatenate([p.replay for p in profiles])
            instant[inside] = np.concatenate([p.instant for p in profiles])
            after[inside] = np.concatenate([p.after for p in profiles])
        for p in profiles:
            if p.lasting:
                for levels in (replay, instant, after):
                    levels[: p.frame.region.start] += p.lasting
        kept = np.cumsum(states)
        return Step(
            judge=self,
            profiles=profiles,
            kept_bytes=int(kept[size]),
            forward=self.plain_forward
            + np.cumsum(forward)[:size]
            + np.where(outside | whole, self.workspace, self.dropped),
            replay=replay + kept[1 : size + 1],
            instant=instant + kept[1 : size + 1],
            after=after + kept[:size],
        )

    def _released(self, profiles: list[Profile], outside: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Return the op whose backward lets go of each storage that is kept for it."""
        released = np.full(len(self.nbytes), self.graph.size, np.intp)
        released[self.outputs] = -1
        pair_op, pair_storage, pair_release = self._pairs
        chosen = outside[pair_op]
        storages, releases = [pair_storage[chosen]], [pair_release[chosen]]
        for p in profiles:
            storages.append(p.inputs)
            releases.append(p.releases)
        np.minimum.at(released, np.concatenate(storages), np.concatenate(releases))
        return released

    def _hold_states(self, frame: Frame, forward: Levels, states: Levels) -> None:
        """Count the random states that a region and those in it keep from their calls on."""
        for f in frame.walk():
            if not f.random:
                continue
            forward[f.region.start] += self.problem.random_state_bytes
            if f.release is None:
                end = max(f.graph_end, f.region.stop - 1)
                forward[min(end + 1, self.graph.size)] -= self.problem.random_state_bytes
            else:
                states[f.release + 1] += self.problem.random_state_bytes

    def _stretch(
        self,
        profiles: list[Profile],
        outside: NDArray[np.bool_],
        released: NDArray[np.intp],
        forward: Levels,
    ) -> None:
        """Lengthen forward lives of what is not kept but held by a call or a dead graph."""
        graph = self.graph
        ends: dict[int, int] = {}
        for p in profiles:
            if p.frame.release is None:
                end = max(p.frame.graph_end, p.frame.region.stop - 1)
                ends.update((s, max(end, ends.get(s, -1))) for s in p.frame.inputs)
            if p.frame.children:
                for s, end in stretched(p.frame.children).items():
                    ends[s] = max(end, ends.get(s, -1))
        for i in self._dead:
            if outside[i]:
                for s in graph.saved[i]:
                    ends[s] = max(graph.graph_end[i], ends.get(s, -1))
        for s, end in ends.items():
            if released[s] == graph.size and end > graph.last_use[s]:
                forward[graph.last_use[s] + 1] += graph.nbytes[s]
                forward[min(end + 1, graph.size)] -= graph.nbytes[s]


_KEPT_REPLAYS = 8
_replays: OrderedDict[int, Replay] = OrderedDict()


def replay_of(problem: Problem) -> Replay:
    """Return the tables of ``problem``, made once as long as it is among the last few used."""
    replay = _replays.get(id(problem))
    if replay is None or replay.problem is not problem:
        replay = _replays[id(problem)] = Replay(problem)
    _replays.move_to_end(id(problem))
    while len(_replays) > _KEPT_REPLAYS:
        _replays.popitem(last=False)
    return replay
