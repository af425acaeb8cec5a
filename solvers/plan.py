"""Plans: which runs of ops run again in backward."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from solvers.errors import PlanError
from solvers.keeping import check_kept
from solvers.problem import Problem
from solvers.prologue import check_prologues

Status = Literal["optimal", "feasible", "time limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A run of consecutive ops, ``start <= i < stop``, that runs again in backward.

    Attributes
    ----------
    start, stop : int
    children : tuple of Region
        Regions inside it: disjoint, in order, each smaller than the parent.
    module : str
        The ``Span.name`` of a region that is a call of a module.
    prologue : tuple of int
        Ops before ``start``, in order, that a replay runs first, without grad. What they make
        is not held for the replay but made again; what they read is held. Only for a region
        with neither parent nor children.
    kept : tuple of int
        Ops of the region, in order, that a replay does not run: what they make and save of
        their own is held, if the replay wants any of it. Only for a region with neither parent
        nor children.
    """

    start: int
    stop: int
    children: tuple[Region, ...] = ()
    module: str = ""
    prologue: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()

    def walk(self) -> Iterator[Region]:
        """Yield this region and all inside it, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Regions, and what they were solved for.

    Attributes
    ----------
    regions : tuple of Region
        Disjoint and in program order. Empty: the plain step.
    solver : str
    status : {"optimal", "feasible", "time limit"}
        ``"optimal"`` only if proven for the class of plans that the solver names.
    budget_bytes : int or None
        The peak (fixed bytes included) that it was solved for.
    peak_bytes, recompute_cost : int or None
        As predicted by ``simulate`` for the problem that it was solved for.
    solve_seconds : float
    signature : str
        ``Problem.signature`` of that problem.
    """

    regions: tuple[Region, ...] = ()
    solver: str = "none"
    status: Status = "feasible"
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    recompute_cost: int | None = None
    solve_seconds: float = 0.0
    signature: str = ""

    @classmethod
    def flat(cls, intervals: Iterable[tuple[int, int]], **fields: Any) -> Self:
        """Make a plan of flat regions from ``(start, stop)`` pairs.

        Examples
        --------
        >>> Plan.flat([(0, 3), (5, 9)]).regions[1].stop
        9
        """
        regions = tuple(Region(start=start, stop=stop) for start, stop in intervals)
        return cls(regions=regions, **fields)

    def walk(self) -> Iterator[Region]:
        """Yield every region, outer ones before those inside them."""
        for region in self.regions:
            yield from region.walk()

    def to_json(self) -> str:
        """Write the plan as JSON.

        Examples
        --------
        >>> plan = Plan.flat([(0, 3)], solver="every_k")
        >>> Plan.from_json(plan.to_json()) == plan
        True
        """
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote; raise PlanError for anything else."""
        try:
            fields = json.loads(text)
            regions = tuple(_region(entry) for entry in fields.pop("regions"))
            return cls(regions=regions, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"This is not a plan written by Plan.to_json: {error}") from error

    def check(self, problem: Problem) -> None:
        """Raise PlanError unless this is a well-formed plan for ``problem``."""
        if self.signature and problem.signature and self.signature != problem.signature:
            raise PlanError(
                f"The plan was made for another model: its stream of calls has the digest "
                f"{self.signature}, this model's has {problem.signature}. Plan again."
            )
        _check_regions(self.regions, 0, len(problem.ops), problem)
        check_prologues(self.regions, problem)
        check_kept(self.regions, problem)
        _check_spans(self, problem)


def _region(entry: dict[str, Any]) -> Region:
    children = tuple(_region(child) for child in entry.get("children", ()))
    return Region(
        start=int(entry["start"]),
        stop=int(entry["stop"]),
        children=children,
        module=str(entry.get("module", "")),
        prologue=tuple(int(op) for op in entry.get("prologue", ())),
        kept=tuple(int(op) for op in entry.get("kept", ())),
    )


def _check_spans(plan: Plan, problem: Problem) -> None:
    if problem.spans is None:
        return
    allowed = {(span.start, span.stop, span.name) for span in problem.spans}
    for region in plan.walk():
        if (region.start, region.stop, region.module) not in allowed:
            named = f" of {region.module!r}" if region.module else ""
            raise PlanError(
                f"region [{region.start}, {region.stop}){named} is no call of a module that may "
                f"run again: with emit='modules' a region is one of Problem.spans."
            )


def _check_regions(regions: tuple[Region, ...], low: int, high: int, problem: Problem) -> None:
    position = low
    for region in regions:
        where = f"region [{region.start}, {region.stop})"
        if not position <= region.start < region.stop <= high:
            raise PlanError(
                f"{where} does not lie in [{position}, {high}): regions are disjoint, in "
                f"order, not empty, and inside their parent."
            )
        for edge in (region.start, region.stop):
            if not problem.boundaries[edge]:
                raise PlanError(
                    f"{where} has an edge before op {edge}, inside a stretch that writes a "
                    f"storage in place: move it to where Problem.boundaries is true."
                )
        pinned = [i for i in range(region.start, region.stop) if problem.ops[i].pinned]
        if pinned:
            op = problem.ops[pinned[0]]
            raise PlanError(
                f"{where} holds op {pinned[0]} ({op.target} at {op.source}), which must stay "
                f"outside all regions."
            )
        if any((c.start, c.stop) == (region.start, region.stop) for c in region.children):
            raise PlanError(f"{where} has a child of its own size.")
        _check_regions(region.children, region.start, region.stop, problem)
        position = region.stop
