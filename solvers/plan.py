"""Plans: which runs of ops run again in backward."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from solvers.errors import PlanError

Status = Literal["optimal", "feasible", "time limit"]

# Characters of a text that an error repeats.
_SHOWN = 60


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
            if not isinstance(fields, dict) or "regions" not in fields:
                raise ValueError(f"{text[:_SHOWN]!r} is no object with 'regions'")
            regions = tuple(_region(entry) for entry in fields.pop("regions"))
            return cls(regions=regions, **fields)
        except KeyError as error:
            raise PlanError(
                f"This is not a plan written by Plan.to_json: a region has no {error}"
            ) from error
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise PlanError(f"This is not a plan written by Plan.to_json: {error}") from error


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
