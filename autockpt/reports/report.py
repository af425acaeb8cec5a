"""What a plan does, for people and as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from autockpt.reports.layers import file_and_line
from autockpt.reports.plotting import plot_timeline
from autockpt.reports.region_rows import RegionRow, region_rows
from autockpt.reports.tables import region_table, to_text, totals
from autockpt.reports.timeline import Timeline, make_timeline
from autockpt.units import Budget
from solvers.plan import Plan
from solvers.prediction import Prediction
from solvers.problem import Problem

if TYPE_CHECKING:
    from autockpt.step import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was planned, for which budget, and what it is predicted to take.

    Attributes
    ----------
    regions : tuple of RegionRow
        In program order, outer ones before those inside them.
    budget_bytes : int or None
        What the peak must not exceed; None if there is nothing to plan.
    budget_text : str
        The budget as it was asked for.
    fixed_bytes : int
        Bytes there at the start of a step with gradients resident; part of every peak here.
    plain_peak_bytes, peak_bytes : int
        Predicted peaks of the step without and with the plan.
    peak_op : str
        Where the predicted peak is: module path, phase of the step and source line, and
        whether gradients that are resident or fresh make it the higher one.
    measured_plain_peak_bytes, measured_peak_bytes : int or None
        The same two as the allocator saw them; None until they are measured.
    cost : str
        What cost is made of: ``"time"`` and ``"roofline"`` count ns.
    forward_cost, recompute_cost : int
        Of one plain forward, and of all that runs again.
    bound_cost : int or None
        A recompute cost that no schedule of any kind can go below at this budget, if known.
    plain_flops, recompute_flops : int
        Floating point operations of one plain step, and of all that runs again.
    solver, status : str
        As in ``Plan``.
    solve_seconds : float
    notes : tuple of str
        What the user should know: checkpoints dissolved, model returned as it is, ...
    timeline : Timeline or None
        Predicted bytes at every instant of the step; ``plot`` draws it.
    """

    regions: tuple[RegionRow, ...] = ()
    budget_bytes: int | None = None
    budget_text: str = ""
    fixed_bytes: int = 0
    plain_peak_bytes: int = 0
    peak_bytes: int = 0
    peak_op: str = ""
    measured_plain_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    cost: str = "time"
    forward_cost: int = 0
    recompute_cost: int = 0
    bound_cost: int | None = None
    plain_flops: int = 0
    recompute_flops: int = 0
    solver: str = "none"
    status: str = "feasible"
    solve_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    timeline: Timeline | None = field(default=None, repr=False)

    @property
    def recompute_share(self) -> float:
        """Recompute cost over the cost of one plain forward."""
        return _ratio(self.recompute_cost, self.forward_cost)

    @property
    def bound_share(self) -> float | None:
        """The bound as a share of one plain forward, if known."""
        return None if self.bound_cost is None else _ratio(self.bound_cost, self.forward_cost)

    @property
    def flop_ratio(self) -> float:
        """FLOPs of the step with the plan over those of the plain step."""
        return 1.0 + _ratio(self.recompute_flops, self.plain_flops)

    def with_measured(self, *, plain_peak_bytes: int | None, peak_bytes: int) -> Report:
        """Return this report with the peaks that were measured."""
        return replace(
            self, measured_plain_peak_bytes=plain_peak_bytes, measured_peak_bytes=peak_bytes
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that ``json.dumps`` takes, shares included, the timeline apart."""
        plain = asdict(replace(self, timeline=None))
        del plain["timeline"]
        return plain | {
            "recompute_share": self.recompute_share,
            "bound_share": self.bound_share,
            "flop_ratio": self.flop_ratio,
        }

    def plot(self, path: str | Path | None = None, *, measured: Measurement | None = None) -> Any:
        """Draw the memory of the step over its ops.

        Parameters
        ----------
        path : str or Path, optional
            Where to write the picture; the ending says what kind.
        measured : Measurement, optional
            Of a step of the optimized model, by ``measure``: drawn beside what was predicted.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ImportError
            Without matplotlib, which ``pip install autockpt[plots]`` brings.
        ValueError
            If nothing was planned yet.
        """
        if self.timeline is None:
            raise ValueError("Nothing was planned yet: there is no step to draw.")
        return plot_timeline(self.timeline, path, measured=measured)

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self.regions:
            parts.append(region_table(self))
        if self.budget_bytes is not None:
            parts.append(totals(self))
        parts.extend(f"Note: {note}" for note in self.notes)
        return Group(*parts) if parts else "Nothing was planned."

    def __str__(self) -> str:
        return to_text(self)


def make_report(
    problem: Problem,
    plan: Plan,
    prediction: Prediction,
    plain: Prediction,
    *,
    budget: Budget,
    cost: str = "time",
    bound_cost: int | None = None,
    notes: Iterable[str] = (),
) -> Report:
    """Build the report of a plan.

    Parameters
    ----------
    problem : Problem
    plan : Plan
    prediction, plain : Prediction
        Of this plan, and of the plan without regions, as ``simulate`` gives them.
    budget : Budget
    cost : str
        Name of the cost.
    bound_cost : int, optional
        Cost that no schedule can go below at this budget.
    notes : iterable of str
    """
    rows = tuple(region_rows(problem, plan.regions, depth=0, start=0, stop=len(problem.ops)))
    return Report(
        regions=rows,
        budget_bytes=budget.peak_bytes,
        budget_text=budget.text,
        fixed_bytes=problem.fixed_bytes,
        plain_peak_bytes=plain.peak_bytes,
        peak_bytes=prediction.peak_bytes,
        peak_op=_peak_op(problem, prediction),
        cost=cost,
        forward_cost=problem.forward_cost,
        recompute_cost=prediction.recompute_cost,
        bound_cost=bound_cost,
        plain_flops=problem.step_flops,
        recompute_flops=prediction.recompute_flops,
        solver=plan.solver,
        status=plan.status,
        solve_seconds=plan.solve_seconds,
        notes=tuple(notes),
        timeline=make_timeline(problem, plan, budget_bytes=budget.peak_bytes),
    )


def _peak_op(problem: Problem, prediction: Prediction) -> str:
    if not 0 <= prediction.peak_op < len(problem.ops):
        return ""
    op = problem.ops[prediction.peak_op]
    source = f", {file_and_line(op.source)}" if op.source else ""
    fresh = prediction.fresh_peak_bytes > prediction.resident_peak_bytes
    gradients = "fresh" if fresh else "resident"
    where = op.module or op.target or op.name
    return f"{where} ({prediction.peak_phase}{source}, gradients {gradients})"


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
