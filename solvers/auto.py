"""The portfolio: the best plan of several solvers, polished under the judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from solvers import chen_greedy, every_k, exhaustive, ilp, modules, rotor, treeverse
from solvers.bounds import bound
from solvers.errors import InfeasibleError
from solvers.judge.replay import Replay, replay_of
from solvers.minimum import least_peak
from solvers.plan import Plan, Region, Status
from solvers.pricing import priced, require
from solvers.problem import Problem
from solvers.search.flat import best_flat, search_of
from solvers.search.interval_search import Segment
from solvers.search.keeping_search import with_any_kept
from solvers.search.local import Deadline, exchanged, fitted, improve, tidied
from solvers.search.nested import best_nested
from solvers.search.prologue_search import with_prologues, without_vain_prologues

Regions = tuple[Region, ...]

_DEARER = (0.5, 0.25)
# Here another way costs next to nothing.
_SMALL_OPS = 300
_ASKED_MORE = 0.02
# Tables know no storage that crosses a whole run: where there are long skip connections, what
# they find for far more than there is may come out cheaper once it is made to fit.
_ASKED_MUCH_MORE = (0.1, 0.4)
_CHANGED_OPS = 100
_PRICES = 8000
_PRICED_OPS = 4_000_000
_FITTED_PART = 8
_NESTING_SHARE = 0.6
_ILP_OPS = 16


def solve(
    problem: Problem,
    budget_bytes: int,
    *,
    seconds: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Return the cheapest plan found by any solver here.

    Parameters
    ----------
    problem : Problem
    budget_bytes : int
        Peak not to exceed, fixed bytes included.
    seconds : float, optional
        After so long, the best plan found by then is returned; the search goes on past it
        only until there is one.
    progress : callable, optional
        Told what is tried, one line at a time.

    Returns
    -------
    Plan
        Status ``"optimal"`` if its cost is 0 or meets the bound of every schedule; ``"time
        limit"`` if that cut the search short.

    Raises
    ------
    InfeasibleError
        Below the peak of every schedule.
    NoPlanFoundError
        Above it, if nothing that fits was found; carries the least peak found.

    Notes
    -----
    Deterministic as long as the limit is not hit. Near linear in the number of ops for models
    that repeat a block.
    """
    if problem.spans is not None:
        return modules.solve(problem, budget_bytes, seconds=seconds, progress=progress)
    search = _Search(replay_of(problem), budget_bytes, Deadline.after(seconds), progress)
    if search.replay.price(())[0] <= budget_bytes:
        return priced(problem, (), "auto", budget_bytes, search.started, "optimal")
    search.run()
    if search.best is None:
        search.say("the least peak")
        plan = priced(problem, least_peak(problem).regions, "auto", budget_bytes, search.started)
        require(problem, plan, budget_bytes)
        search.best = plan.regions
    search.polish()
    return priced(problem, search.best, "auto", budget_bytes, search.started, search.status())


def _merged(*offers: dict[int, list[Segment]]) -> dict[int, list[Segment]]:
    merged: dict[int, list[Segment]] = {}
    for offered in offers:
        for stop, segments in offered.items():
            merged[stop] = [*merged.get(stop, ()), *segments]
    return merged


@dataclass(slots=True)
class _Search:
    """One budget's search: what was found so far, and whether time was left to find it."""

    replay: Replay
    budget_bytes: int
    deadline: Deadline
    progress: Callable[[str], None] | None
    started: float = field(default_factory=time.perf_counter)
    best: Regions | None = None
    cut_short: bool = False

    def say(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)

    def run(self) -> None:
        """Try one way after the other, in rising order of what they take."""
        for candidates in self._ways():
            for regions in candidates:
                self._consider(regions)
            if self.best is not None and self.deadline.over():
                self.cut_short = True
                return

    def _consider(self, regions: Regions | None) -> None:
        if regions is None or self.replay.price(regions)[0] > self.budget_bytes:
            return
        self.best = self._better(self.best, regions)

    def _better(self, best: Regions | None, regions: Regions) -> Regions:
        """Return the cheaper of two; the first where they are equal."""
        if best is None:
            return regions
        (best_peak, best_cost), (peak, cost) = self.replay.price(best), self.replay.price(regions)
        better = (cost, len(regions), peak) < (best_cost, len(best), best_peak)
        return regions if better else best

    def _ways(self) -> Iterator[Iterator[Regions | None]]:
        problem = self.replay.problem
        self.say("one region per k blocks")
        yield iter(every_k.candidates(problem))
        if len(problem.ops) <= exhaustive.MOST_OPS:
            self.say("every flat plan")
            yield exhaustive.flat_plans(problem, 0)
        else:
            self.say("flat regions by dynamic programming")
            yield from self._flat()
        costly = self._is_costly()
        if costly or len(problem.ops) <= _SMALL_OPS:
            self.say("nested regions over the blocks")
            yield iter([rotor.chain_of(self.replay).regions(self.budget_bytes)])
        if costly:
            self.say("regions inside regions")
            yield treeverse.candidates(problem)
            yield iter([best_nested(self.replay, self.budget_bytes)])

    def _is_costly(self) -> bool:
        """Tell whether nested regions may pay: where flat ones cost most of a forward."""
        if self.best is None:
            return True
        return self.replay.price(self.best)[1] > _NESTING_SHARE * self.replay.forward_cost

    def _flat(self) -> Iterator[Iterator[Regions | None]]:
        replay, budget_bytes = self.replay, self.budget_bytes
        yield iter([best_flat(replay, budget_bytes)])
        room = budget_bytes - max(replay.bases)
        if search_of(replay).is_coarse:
            yield (best_flat(replay, budget_bytes, dearer=dearer) for dearer in _DEARER)
        yield self._with_prologues(room)
        if replay.graph.size <= _CHANGED_OPS:
            self.say("regions that are changed until they fit")
            yield self._changed(room)
        if replay.graph.size <= _ILP_OPS:
            self.say("flat regions by integer programming")
            yield iter([self._by_program()])

    def _with_prologues(self, room: int) -> Iterator[Regions | None]:
        """Yield flat regions some of which make inputs again rather than hold them."""
        replay = self.replay
        search = search_of(replay)
        self.say("regions with prologues, and with ops that run once")
        joined, apart = (with_prologues(search, joined=joined) for joined in (True, False))
        kept = _merged(joined, with_any_kept(search))
        if search.is_coarse:
            yield best_flat(replay, self.budget_bytes, kept, dearer=0.5)
            return
        # Tables count too much: what they find for more than there is can be made to fit.
        for offered, asked in ((apart, 0.0), (kept, 0.0), (kept, _ASKED_MORE)):
            regions = search.run(self.budget_bytes + int(asked * room), offered)
            if regions is not None:
                yield self._fitted(without_vain_prologues(replay.problem, regions))

    def _changed(self, room: int) -> Iterator[Regions | None]:
        """Yield what becomes of regions that need not fit, as they are changed until they do."""
        search = search_of(self.replay)
        for asked in _ASKED_MUCH_MORE:
            regions = search.run(self.budget_bytes + int(asked * room))
            if regions is not None:
                yield self._fitted(regions)
        for regions in chen_greedy.candidates(self.replay):
            yield self._fitted(regions)

    def _fitted(self, regions: Regions) -> Regions | None:
        below = None if self.best is None else self.replay.price(self.best)[1]
        prices = self._prices() // _FITTED_PART
        return fitted(self.replay, regions, self.budget_bytes, prices, below)

    def _by_program(self) -> Regions | None:
        try:
            return ilp.solve(self.replay.problem, self.budget_bytes).regions
        except InfeasibleError:
            # Nested regions may still fit.
            return None

    def _prices(self) -> int:
        """Return how often the judge may be asked: less often where it takes longer."""
        return min(_PRICES, max(60, _PRICED_OPS // max(1, self.replay.graph.size)))

    def polish(self) -> None:
        """Improve the best plan by small changes, and let go of regions that do nothing."""
        assert self.best is not None
        replay, budget_bytes = self.replay, self.budget_bytes
        self.say("local search")
        for keeping in (False, True):
            better = improve(
                replay,
                self.best,
                budget_bytes,
                self._prices(),
                self.deadline,
                keeping=keeping,
            )
            self.best = self._better(self.best, tidied(replay, better, budget_bytes))
        self.say("exchanges")
        better = exchanged(replay, self.best, budget_bytes, self._prices(), self.deadline)
        self.best = self._better(self.best, tidied(replay, better, budget_bytes))
        self.cut_short = self.cut_short or self.deadline.over()

    def status(self) -> Status:
        assert self.best is not None
        problem = self.replay.problem
        cost = self.replay.price(self.best)[1]
        if cost == 0 or (not self.cut_short and cost <= bound(problem, self.budget_bytes)):
            return "optimal"
        return "time limit" if self.cut_short else "feasible"
