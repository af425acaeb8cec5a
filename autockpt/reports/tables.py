"""A report as tables, and how anything is printed to a string."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table

from autockpt.reports.layers import layer_pattern, name_together
from autockpt.reports.region_rows import RegionRow
from autockpt.units import format_bytes

if TYPE_CHECKING:
    from autockpt.reports.report import Report

_WIDTH = 110


def to_text(renderable: RenderableType) -> str:
    """Print to a string, without colours, the same on every terminal."""
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None, legacy_windows=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


def region_table(report: Report) -> Table:
    """Lay out the regions, those that say the same of repeated layers in one row."""
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


def totals(report: Report) -> Table:
    """Lay out budget, peaks, cost and bound."""
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
