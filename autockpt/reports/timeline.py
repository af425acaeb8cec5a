"""Bytes over one training step, instant by instant, with the line of code behind each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from solvers.plan import Plan
from solvers.prediction import Phase
from solvers.problem import Problem
from solvers.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """One instant of a step: an op that runs, is run again, or is differentiated.

    Attributes
    ----------
    phase : {"forward", "recompute", "backward"}
    op : int
        Its index in program order.
    target : str
        The function that is called.
    module, source : str
        Where that was, ``file.py:12``.
    region : int or None
        Which outermost region of the plan it is in.
    nbytes : int
        Predicted to be alive, fixed bytes included, gradients resident.
    """

    phase: Phase
    op: int
    target: str
    module: str
    source: str
    region: int | None
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The predicted memory of a step, in the order in which things happen.

    Attributes
    ----------
    instants : tuple of Instant
        An op's backward has two: while it runs, and when it has let go of what was saved.
    fixed_bytes : int
    budget_bytes : int or None
    """

    instants: tuple[Instant, ...]
    fixed_bytes: int
    budget_bytes: int | None = None

    @property
    def peak(self) -> Instant:
        """The highest instant, the first of them if there are several."""
        return max(self.instants, key=lambda instant: instant.nbytes)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return plain data, one dict an instant."""
        return [asdict(instant) for instant in self.instants]

    def regions(self) -> Iterator[tuple[int, int, int, Phase]]:
        """Yield each stretch of instants in one region: number, start, stop, phase."""
        start = 0
        keys = [
            (i.region, "forward" if i.phase == "forward" else "backward") for i in self.instants
        ]
        for stop in range(1, len(keys) + 1):
            if stop < len(keys) and keys[stop] == keys[start]:
                continue
            region, phase = keys[start]
            if region is not None:
                yield region, start, stop, "forward" if phase == "forward" else "backward"
            start = stop


def make_timeline(problem: Problem, plan: Plan, *, budget_bytes: int | None = None) -> Timeline:
    """List every instant of a step of ``problem`` under ``plan``.

    Raises
    ------
    PlanError
        If the plan is not one for this problem.
    """
    region_of = {
        op: number
        for number, region in enumerate(plan.regions)
        for op in range(region.start, region.stop)
    }
    events = simulate(problem, plan, timeline=True).timeline
    return Timeline(
        instants=tuple(
            Instant(
                phase=phase,
                op=op,
                target=problem.ops[op].target,
                module=problem.ops[op].module,
                source=problem.ops[op].source,
                region=region_of.get(turn),
                nbytes=nbytes,
            )
            for (phase, op, nbytes), turn in zip(events, _turns(events), strict=True)
        ),
        fixed_bytes=problem.fixed_bytes,
        budget_bytes=budget_bytes,
    )


def _turns(events: Sequence[tuple[Phase, int, int]]) -> list[int]:
    """Return whose turn each instant is: of a replay, the op whose backward brings it about.

    What a replay runs first, a prologue, may lie in another region.
    """
    turns: list[int] = []
    turn = -1
    for phase, op, _ in reversed(events):
        if phase != "recompute":
            turn = op
        turns.append(turn)
    return turns[::-1]
