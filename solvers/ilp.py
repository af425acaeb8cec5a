"""Best flat regions by integer programming, with the judge adding what the model lacks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pulp

from solvers.judge.replay import Replay, replay_of
from solvers.judge.step import NOTHING
from solvers.minimum import least_flat_peak
from solvers.plan import Plan, Region, Status
from solvers.pricing import priced, require
from solvers.problem import Problem
from solvers.programs import run_program
from solvers.search.flat import best_flat, search_of
from solvers.search.intervals import region_edges

SMALL_OPS = 40
_SECONDS = 20.0
_ASKED_SHARES = (1.0, 0.9, 1.1)


def solve(problem: Problem, budget_bytes: int, *, seconds: float = _SECONDS) -> Plan:
    """Plan flat regions with a binary program, exact under the judge where it is small.

    Parameters
    ----------
    problem : Problem
    budget_bytes : int
        Peak not to exceed, fixed bytes included.
    seconds : float
        Limit on the time spent on the program. Where it leaves no plan, that of ``interval_dp``
        is taken.

    Returns
    -------
    Plan
        Status ``"optimal"`` if all flat plans were in the program (at most 40 ops) and it was
        solved to the end without a gap; ``"feasible"`` if it was solved over a choice of edges
        taken from dynamic programs; ``"time limit"`` if not solved.

    Raises
    ------
    NoPlanFoundError, InfeasibleError
        If nothing that fits was found, or nothing can exist.

    Notes
    -----
    A binary variable per region and per op outside, so that each op is covered once; a variable
    per storage and instant at which a new holder may take it; the peak at every op as a row.
    The rows never exclude a plan that fits. Where the judge finds the solution over budget,
    that solution is cut off and the program solved again.
    """
    started = time.perf_counter()
    replay = replay_of(problem)
    size = len(problem.ops)
    whole = size <= SMALL_OPS
    edges = _edges(replay, budget_bytes, whole)
    program = FlatProgram(replay, budget_bytes, edges)
    regions, solved = program.solve(started + seconds)
    status: Status = "time limit"
    if solved:
        status = "optimal" if whole and regions is not None else "feasible"
    if regions is None:
        regions = best_flat(replay, budget_bytes)
    if regions is None:
        # What the error names as the least peak is found when it is then asked for.
        regions = least_flat_peak(problem).regions
    plan = priced(problem, regions, "ilp", budget_bytes, started, status)
    return require(problem, plan, budget_bytes)


def _edges(replay: Replay, budget_bytes: int, whole: bool) -> list[int]:
    """Return the positions where regions may start and stop."""
    size = replay.graph.size
    if whole:
        return list(range(size + 1))
    room = budget_bytes - replay.bases[1]
    edges: set[int] = set()
    for share in _ASKED_SHARES:
        found = best_flat(replay, budget_bytes - room + int(share * room)) or ()
        edges.update(edge for region in found for edge in (region.start, region.stop))
    return sorted(edges)


@dataclass(slots=True)
class FlatProgram:
    """The binary program of one problem and budget."""

    replay: Replay
    budget_bytes: int
    edges: list[int]
    model: pulp.LpProblem = field(init=False)
    chosen: dict[tuple[int, int], pulp.LpVariable] = field(init=False)
    outside: list[pulp.LpVariable] = field(init=False)
    impossible: bool = False
    _holders: dict[int, dict[int, pulp.LpVariable]] = field(init=False)

    def __post_init__(self) -> None:
        size = self.replay.graph.size
        tables = search_of(self.replay).tables
        # A region that saves nothing may still need less in forward than its ops outside.
        legal = region_edges(self.replay) if size <= SMALL_OPS else None
        pairs = [
            (i, j)
            for k, i in enumerate(self.edges)
            for j in self.edges[k + 1 :]
            if (tables.allowed[i, j - i] if legal is None else legal[i, j])
            and self._region_need(i, j) <= self.budget_bytes
        ]
        self.model = pulp.LpProblem("flat", pulp.LpMinimize)
        self.chosen = {
            (i, j): self.model.add_variable(f"region_{i}_{j}", cat=pulp.LpBinary) for i, j in pairs
        }
        self.outside = [self.model.add_variable(f"outside_{v}", 0, 1) for v in range(size)]
        # Costs as shares of a forward, so that the backend's tolerances fit them.
        total = max(1, self.replay.forward_cost)
        self.model += pulp.lpSum(
            x * (self._cost(i, j) / total) for (i, j), x in self.chosen.items()
        )
        self._cover()
        self._hold()
        self._fit()

    def _cover(self) -> None:
        over: list[list[pulp.LpVariable]] = [[] for _ in self.outside]
        for (i, j), x in self.chosen.items():
            for v in range(i, j):
                over[v].append(x)
        for v, y in enumerate(self.outside):
            self.model += y + pulp.lpSum(over[v]) == 1

    def _hold(self) -> None:
        """Make the variables of what is held, by storage and by the last op of its holder."""
        graph = self.replay.graph
        holders: dict[int, dict[int, list[pulp.LpVariable]]] = {}
        outputs = set(graph.outputs)
        for v, release in enumerate(graph.release):
            for s in graph.saved[v] if release is not None else ():
                holders.setdefault(s, {}).setdefault(v, []).append(self.outside[v])
        for (i, j), x in self.chosen.items():
            frame = self.replay.frames(Region(start=i, stop=j))
            for s in frame.inputs if frame.release is not None else ():
                holders.setdefault(s, {}).setdefault(j - 1, []).append(x)
        self._holders = {}
        for s, by_op in sorted(holders.items()):
            if s in outputs:
                continue
            earlier: pulp.LpVariable | None = None
            self._holders[s] = {}
            for op in sorted(by_op):
                held = self.model.add_variable(f"held_{s}_{op}", 0, 1)
                for x in by_op[op]:
                    self.model += held >= x
                if earlier is not None:
                    self.model += held >= earlier
                self._holders[s][op] = held
                earlier = held

    def _held_at(self, op: int) -> list[tuple[int, pulp.LpVariable]]:
        """Return bytes that may still be held at an instant of backward, with the variable."""
        found = []
        for s, by_op in self._holders.items():
            last = max((v for v in by_op if v <= op), default=None)
            if last is not None:
                found.append((self.replay.graph.nbytes[s], by_op[last]))
        return found

    def _fit(self) -> None:
        """Demand at every op that what is alive fits; in backward, then in forward."""
        replay, graph = self.replay, self.replay.graph
        ending: dict[int, list[tuple[int, pulp.LpVariable]]] = {}
        for (i, j), x in self.chosen.items():
            ending.setdefault(j - 1, []).append((self._region_need(i, j), x))
        outputs = sum(graph.nbytes[s] for s in graph.outputs)
        plain = replay.plain_forward
        for v, y in enumerate(self.outside):
            instant = max(int(levels[v]) for levels in replay.instant)
            after = max(int(levels[v]) for levels in replay.after)
            terms = self._held_at(v) + ending.get(v, [])
            if instant > NOTHING:
                terms.append((instant, y))
                self._row([*self._held_at(v - 1), (after, y)], outputs)
            self._row(terms, outputs)
            dropped = int(replay.dropped[v])
            terms = [(int(replay.workspace[v]) - dropped, y)]
            terms += [
                (graph.nbytes[s], by_op[max(by_op)])
                for s, by_op in self._holders.items()
                if graph.last_use[s] < v
            ]
            self._row(terms, max(replay.bases) + int(plain[v]) + dropped)

    def _region_need(self, start: int, stop: int) -> int:
        """Return a region's peak in backward as long as it holds its inputs."""
        replay = self.replay
        profile = replay.profile(Region(start=start, stop=stop))
        release = profile.frame.release
        low = start if release is None else max(start, release)
        inside, above = slice(low - start, None), slice(low + 1 - start, None)
        need = 0
        for mode in (0, 1):
            span, rest = slice(low, stop), slice(low + 1, stop)
            need = max(
                need,
                int((profile.replay[inside] + replay.before[mode][span]).max()),
                int((profile.instant[inside] + replay.instant[mode][span]).max()),
                int((profile.after[above] + replay.after[mode][rest]).max(initial=0)),
            )
        states = replay.problem.random_state_bytes if profile.frame.random else 0
        return need + states if release is not None else need

    def _row(self, terms: list[tuple[int, pulp.LpVariable]], level: int) -> None:
        scale = max(1, self.budget_bytes)
        if not any(nbytes for nbytes, _ in terms):
            self.impossible |= level > self.budget_bytes
            return
        self.model += (
            pulp.lpSum(x * (nbytes / scale) for nbytes, x in terms if nbytes)
            <= (self.budget_bytes - level) / scale
        )

    def _cost(self, start: int, stop: int) -> int:
        """Return what the judge counts for a region: nothing where it never runs again."""
        return self.replay.profile(Region(start=start, stop=stop)).cost

    def solve(self, deadline: float) -> tuple[tuple[Region, ...] | None, bool]:
        """Solve, let the judge cut off what does not fit, and solve again.

        Returns
        -------
        regions : tuple of Region or None
            The best that fits, None if none was found.
        solved : bool
            Whether that is proven for this program.
        """
        if self.impossible:
            return None, True
        if not self.chosen:
            return (() if self.replay.price(())[0] <= self.budget_bytes else None), True
        while True:
            seconds = deadline - time.perf_counter()
            if seconds <= 0:
                return None, False
            run_program(self.model, seconds=seconds, exact=True)
            if self.model.status == pulp.LpStatusInfeasible:
                return None, True
            if self.model.sol_status not in (
                pulp.LpSolutionOptimal,
                pulp.LpSolutionIntegerFeasible,
            ):
                return None, False
            pairs = sorted(pair for pair, x in self.chosen.items() if x.value() > 0.5)
            regions = tuple(Region(start=i, stop=j) for i, j in pairs)
            if self.replay.price(regions)[0] <= self.budget_bytes:
                return regions, self.model.sol_status == pulp.LpSolutionOptimal
            taken = set(pairs)
            self.model += (
                pulp.lpSum(1 - x if pair in taken else x for pair, x in self.chosen.items()) >= 1
            )
