"""What a plan does, for people: a table, and the same as plain data."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from autockpt.layers import file_and_line, layer_pattern, name_together
from autockpt.plotting import plot_timeline
from autockpt.timeline import Timeline, make_timeline
from autockpt.units import Budget, format_bytes
from solvers.keeping import held_for
from solvers.plan import Plan, Region
from solvers.prediction import Prediction
from solvers.problem import Op, Problem
from solvers.replay import replay_of

if TYPE_CHECKING:
    from autockpt.step import Measurement

_WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRow:
    """One region of a plan.

    Attributes
    ----------
    module : str
        Dotted path of the module that holds all its ops, or the first and the last one.
    source : str
        ``file.py:line`` of its first op.
    start, stop : int
        Its ops are ``start <= i < stop`` in program order.
    depth : int
        0 for a region in no other one.
    freed_bytes : int
        Saved storages that do not live from forward to backward because of it (for a nested
        region: from its parent's recomputation to its own), less what is kept for it alone:
        inputs that nothing else keeps, and the state of the generator.
    recompute_cost, recompute_flops : int
        Of running it again once, up to its early stop.
    random : bool
        Whether it draws random numbers, and so keeps the state of the generator.
    kept : int
        Number of its ops that do not run again: what they make and save is held instead.
    prologue : int
        Number of ops before it that run again with it, as what they make is not held for it.
    """

    module: str
    source: str
    start: int
    stop: int
    depth: int
    freed_bytes: int
    recompute_cost: int
    recompute_flops: int
    random: bool
    kept: int = 0
    prologue: int = 0

    @property
    def ops(self) -> int:
        """Number of its ops."""
        return self.stop - self.start


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
            parts.append(_region_table(self))
        if self.budget_bytes is not None:
            parts.append(_totals(self))
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
    rows = tuple(_rows(problem, plan.regions, depth=0, start=0, stop=len(problem.ops)))
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


def to_text(renderable: RenderableType) -> str:
    """Print to a string, without colours, the same on every terminal."""
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None, legacy_windows=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


def _peak_op(problem: Problem, prediction: Prediction) -> str:
    if not 0 <= prediction.peak_op < len(problem.ops):
        return ""
    op = problem.ops[prediction.peak_op]
    source = f", {file_and_line(op.source)}" if op.source else ""
    fresh = prediction.fresh_peak_bytes > prediction.resident_peak_bytes
    gradients = "fresh" if fresh else "resident"
    where = op.module or op.target or op.name
    return f"{where} ({prediction.peak_phase}{source}, gradients {gradients})"


# Rows


def _rows(
    problem: Problem, regions: tuple[Region, ...], *, depth: int, start: int, stop: int
) -> Iterator[RegionRow]:
    """Yield a row for each region; ``start`` and ``stop`` delimit what surrounds them."""
    freed = _freed_bytes(problem, regions, start, stop)
    for region, freed_bytes in zip(regions, freed, strict=True):
        ops = problem.ops[region.start : region.stop]
        frame = replay_of(problem).frames(region)
        yield RegionRow(
            module=region.module or _common_module(ops),
            source=file_and_line(ops[0].source),
            start=region.start,
            stop=region.stop,
            depth=depth,
            freed_bytes=freed_bytes,
            recompute_cost=frame.cost,
            recompute_flops=frame.flops,
            random=any(op.random for op in ops),
            kept=len(region.kept),
            prologue=len(region.prologue),
        )
        yield from _rows(
            problem, region.children, depth=depth + 1, start=region.start, stop=region.stop
        )


def _freed_bytes(
    problem: Problem, regions: tuple[Region, ...], start: int, stop: int
) -> Iterator[int]:
    """Yield, for each region, the bytes it frees less those that are kept for it alone."""
    inside = {index for region in regions for index in range(region.start, region.stop)}
    held = {problem.values[value].storage for value in problem.outputs}
    for index in set(range(start, stop)) - inside:
        held.update(problem.ops[index].saved)
    saved = _saved_storages(problem, start, stop)
    inputs = [_input_storages(problem, region) for region in regions]
    frames = replay_of(problem).frames
    kept = (s for region in regions for i in frames(region).kept for s in held_for(problem, i))
    lasting = held.union(kept, *inputs)
    kept_anyway = held | saved
    made = _made_storages(problem, range(start, stop))
    for region, its_inputs in zip(regions, inputs, strict=True):
        freed = _saved_storages(problem, region.start, region.stop)
        freed &= _made_storages(problem, range(region.start, region.stop))
        extra = (its_inputs & made) - kept_anyway
        # A storage that several regions read is kept once, and charged to the first.
        kept_anyway |= extra
        state = any(op.random for op in problem.ops[region.start : region.stop])
        yield (
            _nbytes(problem, freed - lasting)
            - _nbytes(problem, extra)
            - state * problem.random_state_bytes
        )


def _saved_storages(problem: Problem, start: int, stop: int) -> set[int]:
    return {storage for op in problem.ops[start:stop] for storage in op.saved}


def _input_storages(problem: Problem, region: Region) -> set[int]:
    ran = [*region.prologue, *range(region.start, region.stop)]
    read = {
        problem.values[value].storage
        for index in ran
        for value in problem.ops[index].inputs
        if not problem.values[value].parameter
    }
    return read - _made_storages(problem, ran)


def _nbytes(problem: Problem, storages: set[int]) -> int:
    return sum(problem.storages[storage].nbytes for storage in storages)


def _made_storages(problem: Problem, ops: Collection[int]) -> set[int]:
    return {index for index, item in enumerate(problem.storages) if item.producer in ops}


def _common_module(ops: tuple[Op, ...]) -> str:
    """Return ``h.3.attn`` for ops of one module, ``h.3-4`` for layers, else first and last."""
    paths = [tuple(op.module.split(".")) for op in ops if op.module]
    if not paths:
        return "(top)"
    depth = 0
    while all(len(path) > depth for path in paths) and len({path[depth] for path in paths}) == 1:
        depth += 1
    common, nexts = paths[0][:depth], [path[depth : depth + 1] for path in paths]
    if all(name and name[0].isdigit() for name in nexts):
        return ".".join((*common, f"{nexts[0][0]}-{nexts[-1][0]}"))
    return ".".join(common) or f"{_layer(paths[0])} .. {_layer(paths[-1])}"


def _layer(path: tuple[str, ...]) -> str:
    """Return a path up to its first index: ``down_blocks.0``."""
    depth = next((depth for depth, name in enumerate(path, 1) if name.isdigit()), len(path))
    return ".".join(path[:depth])


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


# Tables


def _region_table(report: Report) -> Table:
    table = Table(title="Regions that run again in backward", title_justify="left")
    table.add_column("module", overflow="fold")
    table.add_column("source", no_wrap=True)
    for name in ("regions", "ops", "frees", "runs again"):
        table.add_column(name, justify="right")
    more = [name for name in ("kept", "prologue") if any(getattr(r, name) for r in report.regions)]
    for name in more:
        table.add_column(name, justify="right")
    table.add_column("random")
    for rows in _alike(report.regions):
        first = rows[0]
        table.add_row(
            "  " * first.depth + name_together([row.module for row in rows]),
            first.source,
            str(len(rows)),
            str(first.ops),
            format_bytes(sum(row.freed_bytes for row in rows)),
            _cost_text(report, sum(row.recompute_cost for row in rows)),
            *(str(getattr(first, name) or "") for name in more),
            "yes" if first.random else "",
        )
    return table


def _alike(rows: tuple[RegionRow, ...]) -> list[list[RegionRow]]:
    """Group the rows that say the same of repeated layers, in the order of the first ones."""
    groups: dict[tuple[object, ...], list[RegionRow]] = {}
    for row in rows:
        pattern = layer_pattern(row.module)
        same = row.depth, row.ops, row.freed_bytes, row.random, row.kept, row.prologue
        key = (pattern, row.source, *same)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _totals(report: Report) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, text in _total_lines(report):
        table.add_row(name, text)
    return table


def _total_lines(report: Report) -> Iterator[tuple[str, str]]:
    assert report.budget_bytes is not None
    asked = f" (asked: {report.budget_text})" if report.budget_text else ""
    yield "budget", format_bytes(report.budget_bytes) + asked
    yield "peak, plain", _both(report.plain_peak_bytes, report.measured_plain_peak_bytes)
    yield "peak, planned", _both(report.peak_bytes, report.measured_peak_bytes)
    if report.peak_op:
        yield "peak is at", report.peak_op
    yield "of it fixed", f"{format_bytes(report.fixed_bytes)} (what no checkpoint can change)"
    yield "runs again", _recompute_text(report)
    yield "FLOPs of a step", f"{report.flop_ratio:.3f} times those of the plain step"
    yield "solver", f"{report.solver}, {report.status}, {report.solve_seconds:.2f} s"


def _both(predicted: int, measured: int | None) -> str:
    text = f"{format_bytes(predicted)} predicted"
    return text if measured is None else f"{text}, {format_bytes(measured)} measured"


def _recompute_text(report: Report) -> str:
    text = f"{report.recompute_share:.1%} of a forward ({_cost_text(report, report.recompute_cost)}"
    text += f", cost: {report.cost})"
    if report.bound_share is not None:
        text += f"; no schedule can do with less than {report.bound_share:.1%}"
    return text


def _cost_text(report: Report, cost: int) -> str:
    return f"{cost / 1e6:.2f} ms" if report.cost in ("time", "roofline") else f"{cost:,}"
