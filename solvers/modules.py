"""Regions that are calls of modules: a set of spans, nested as the modules are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

from solvers.bounds import bound
from solvers.judge.replay import Replay, replay_of
from solvers.plan import Plan, Region, Status
from solvers.pricing import priced, require
from solvers.problem import Problem, Span
from solvers.search.local import Deadline
from solvers.steady import steady

Chosen = frozenset[int]
"""Indices of the spans that are regions. As spans nest, a set of them is a plan."""

_BEAM = 8
_ROUNDS = 5
_PRICED_OPS = 2_000_000
_STARTS = 4


def solve(
    problem: Problem,
    budget_bytes: int,
    *,
    seconds: float | None = None,
    progress: Callable[[str], None] | None = None,
    nested: bool = True,
) -> Plan:
    """Return the cheapest set of module calls found that fits when they run under ``checkpoint``.

    Parameters
    ----------
    problem : Problem
        With ``spans``.
    budget_bytes : int
        Peak not to exceed, fixed bytes included.
    seconds, progress
        As for ``auto``.
    nested : bool
        Whether regions may lie in regions.

    Returns
    -------
    Plan
        Status ``"optimal"`` if its cost is 0 or meets the bound of every schedule.

    Raises
    ------
    InfeasibleError, NoPlanFoundError

    Notes
    -----
    Modules of one kind (blocks of a list, say) are first taken or left together, which a beam
    search over kinds does; what comes of it is mixed module by module, and polished by changes
    of single modules. Every step is judged by ``simulate``'s price. Deterministic as long as
    the limit is not hit.
    """
    limit = Deadline.after(seconds)
    search = _Search(replay_of(problem), budget_bytes, limit, progress, nested)
    if search.price(frozenset())[0] <= budget_bytes:
        return priced(problem, (), "auto", budget_bytes, search.started, "optimal")
    search.run()
    regions = search.regions(search.best)
    if search.price(search.best)[0] > budget_bytes:
        search.say("the least peak")
        regions = least_peak(problem, nested=nested).regions
    plan = priced(problem, regions, "auto", budget_bytes, search.started)
    require(problem, plan, budget_bytes)
    cost = search.replay.price(regions)[1]
    status: Status = "time limit" if search.deadline.over() else "feasible"
    if cost == 0 or cost <= bound(problem, budget_bytes):
        status = "optimal"
    return priced(problem, regions, "auto", budget_bytes, search.started, status)


def least_peak(problem: Problem, *, nested: bool = True) -> Plan:
    """Return the set of module calls of least peak that was found; the same whatever the costs."""
    replay = replay_of(steady(problem))
    search = _Search(replay, 0, Deadline(), None, nested)
    found = replay.least if nested else replay.least_flat
    if found is None:
        search.run()
        found = search.regions(search.best)
        if nested:
            replay.least = found
        else:
            replay.least_flat = found
    peak = replay.price(found)[0]
    return priced(problem, found, "least_peak", peak, search.started)


@dataclass(slots=True)
class _Search:
    replay: Replay
    budget_bytes: int
    deadline: Deadline
    progress: Callable[[str], None] | None
    nested: bool = True
    started: float = field(default_factory=time.perf_counter)
    best: Chosen = frozenset()
    spans: tuple[Span, ...] = ()
    inside: list[tuple[int, ...]] = field(default_factory=list)
    prices: dict[Chosen, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spans = self.replay.problem.spans or ()
        self.inside = [
            tuple(
                j
                for j, inner in enumerate(self.spans)
                if j != i and span.start <= inner.start and inner.stop <= span.stop
            )
            for i, span in enumerate(self.spans)
        ]

    def say(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)

    # Judging.

    def price(self, chosen: Chosen) -> tuple[int, int]:
        """Return peak and cost of a set."""
        found = self.prices.get(chosen)
        if found is None:
            found = self.prices[chosen] = self.replay.price(self.regions(chosen))
        return found

    def rank(self, chosen: Chosen) -> tuple[int, int, int, int]:
        """Return what is least for the best set: first to fit, then to be cheap."""
        peak, cost = self.price(chosen)
        over = max(0, peak - self.budget_bytes)
        return over, cost, len(chosen), peak

    def regions(self, chosen: Chosen) -> tuple[Region, ...]:
        """Return the regions that a set of spans makes."""
        order = sorted(chosen)
        made, _ = self._nest(order, 0, len(self.replay.problem.ops))
        return made

    def _nest(self, order: list[int], at: int, stop: int) -> tuple[tuple[Region, ...], int]:
        # Outer spans come before those inside them, so one pass builds the forest.
        made: list[Region] = []
        while at < len(order) and self.spans[order[at]].start < stop:
            span = self.spans[order[at]]
            children, at = self._nest(order, at + 1, span.stop)
            made.append(
                Region(
                    start=span.start,
                    stop=span.stop,
                    children=children if self.nested else (),
                    module=span.name,
                )
            )
        return tuple(made), at

    def left(self) -> bool:
        """Tell whether there is time to ask the judge more."""
        most = max(300, _PRICED_OPS // max(1, self.replay.graph.size))
        return len(self.prices) < most and not self.deadline.over()

    # Searching.

    def run(self) -> None:
        """Search, and leave the best set in ``best``."""
        self.say("modules of a kind, all or none")
        found = self._by_kind()
        self.best = min(found, key=self.rank)
        self.say("mixing kinds")
        fitting = [c for c in found if self.rank(c)[0] == 0][:_STARTS] or [self.best]
        others = [c for c in found if c not in fitting][: 2 * _STARTS]
        starts = [self._grown()]
        for start in fitting:
            starts += [self._mixed(start, other) for other in (frozenset[int](), *others)]
        self.say("local search")
        for start in sorted(dict.fromkeys(starts), key=self.rank)[: 2 * _STARTS]:
            self._consider(self._polished(start, self._changes))
        self.best = self._polished(self.best, self._exchanges)

    def _consider(self, chosen: Chosen) -> None:
        if self.rank(chosen) < self.rank(self.best):
            self.best = chosen

    def _by_kind(self) -> list[Chosen]:
        """Search over sets of kinds; return the sets of spans seen, best first."""
        kinds = self._kinds()
        seen: dict[frozenset[int], Chosen] = {frozenset(): frozenset()}
        beam = [frozenset[int]()]
        for _ in range(_ROUNDS):
            new = []
            for kind_set in beam:
                for k in range(len(kinds)):
                    changed = kind_set ^ {k}
                    if changed in seen or not self.left():
                        continue
                    members = (i for kind in changed for i in kinds[kind])
                    seen[changed] = frozenset(members)
                    new.append(changed)
            beam = self._frontier(dict.fromkeys((*beam, *new)), seen)
            if not new:
                break
        return sorted(dict.fromkeys(seen.values()), key=self.rank)

    def _kinds(self) -> list[tuple[int, ...]]:
        """Group the spans whose modules are alike: of one place in a layer, with like calls."""
        ops = self.replay.problem.ops
        groups: dict[object, list[int]] = {}
        for i, span in enumerate(self.spans):
            path = span.name.partition(":")[0].split(".")
            place = tuple("#" if name.isdigit() else name for name in path)
            calls = frozenset(op.target for op in ops[span.start : span.stop] if op.target)
            groups.setdefault((place, calls), []).append(i)
        return [tuple(group) for group in groups.values()]

    def _frontier(
        self, keys: Iterable[frozenset[int]], seen: dict[frozenset[int], Chosen]
    ) -> list[frozenset[int]]:
        """Return the keys that no other beats in both peak and cost, spread over their range."""
        kept: list[frozenset[int]] = []
        least: int | None = None
        for key in sorted(keys, key=lambda k: (self.price(seen[k])[::-1], len(seen[k]))):
            peak = self.price(seen[key])[0]
            if least is None or peak < least:
                kept.append(key)
                least = peak
        if len(kept) <= _BEAM:
            return kept
        # What lies around the budget matters most.
        kept.sort(key=lambda k: abs(self.price(seen[k])[0] - self.budget_bytes))
        return kept[:_BEAM]

    def _mixed(self, chosen: Chosen, other: Chosen) -> Chosen:
        """Return a set changed, module by module, to what another does, where that is better."""
        pending = list(range(len(self.spans) - 1, -1, -1))
        done: set[int] = set()
        while pending and self.left():
            i = pending.pop()
            if i in done:
                continue
            part = frozenset((i, *self.inside[i]))
            if chosen & part == other & part:
                done |= part
                continue
            changed = (chosen - part) | (other & part)
            if self.rank(changed) < self.rank(chosen):
                chosen = changed
                done |= part
        return chosen

    def _grown(self) -> Chosen:
        """Return a set that was grown from nothing, by what costs least for what it brings."""
        chosen: Chosen = frozenset()
        while self.rank(chosen)[0] and self.left():
            over, cost = self.rank(chosen)[:2]
            best: tuple[float, Chosen] | None = None
            for changed in self._changes(chosen):
                new_over, new_cost = self.rank(changed)[:2]
                if new_over < over and self.left():
                    rate = (new_cost - cost) / (over - new_over)
                    if best is None or rate < best[0]:
                        best = rate, changed
            if best is None:
                break
            chosen = best[1]
        return chosen

    def _polished(self, chosen: Chosen, changes: Callable[[Chosen], Iterator[Chosen]]) -> Chosen:
        """Return a set after all single changes that help."""
        improved = True
        while improved and self.left():
            improved = False
            for changed in changes(chosen):
                if not self.left():
                    return chosen
                if self.rank(changed) < self.rank(chosen):
                    chosen = changed
                    improved = True
                    break
        return chosen

    def _changes(self, chosen: Chosen) -> Iterator[Chosen]:
        for i in sorted(chosen):
            yield chosen - {i}
        for i in range(len(self.spans)):
            part = frozenset(self.inside[i])
            if i not in chosen:
                yield chosen | {i}
                yield (chosen - part) | {i}
            else:
                direct = self._direct(part)
                yield (chosen - {i}) | direct
                yield chosen | direct

    def _exchanges(self, chosen: Chosen) -> Iterator[Chosen]:
        """Yield the sets with one or two spans instead of one, and with one instead of two."""
        yield from self._changes(chosen)
        out = [i for i in range(len(self.spans)) if i not in chosen]
        for i in sorted(chosen):
            for j in out:
                yield (chosen - {i}) | {j}
        for i in sorted(chosen):
            for j, k in combinations(out, 2):
                yield (chosen - {i}) | {j, k}
        for i, j in combinations(sorted(chosen), 2):
            for k in out:
                yield (chosen - {i, j}) | {k}

    def _direct(self, part: frozenset[int]) -> Chosen:
        """Return the outermost spans of a part."""
        covered = {j for i in part for j in self.inside[i]}
        return frozenset(part - covered)
