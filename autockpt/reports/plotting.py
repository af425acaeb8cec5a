"""Pictures of a step's memory. matplotlib is an optional extra, imported when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autockpt.reports.layers import file_and_line
from autockpt.reports.timeline import Timeline
from autockpt.units import format_bytes

if TYPE_CHECKING:
    from autockpt.step import Measurement

Levels = NDArray[np.float64]

_MIB = 2**20
_MOST_PAIRS = 20_000_000
_REGIONS = ("#dbe9f6", "#f2e3cf")


def plot_timeline(
    timeline: Timeline, path: str | Path | None = None, *, measured: Measurement | None = None
) -> Any:
    """Draw predicted bytes over the instants of a step, and measured ones beside them.

    Regions are shaded where they run in forward and again in backward, the budget is a line,
    the peak is labelled. Measured levels have an instant for each allocation, predicted ones
    for each op: the order of both is kept, and measured levels are drawn as they are, each at
    the op where it fits best.

    Parameters
    ----------
    timeline : Timeline
    path : str or Path, optional
        Where to write the picture; the ending says what kind.
    measured : Measurement, optional

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        If matplotlib is not there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Drawing a timeline takes matplotlib: pip install 'autockpt[plots]'. Without it, "
            "report.timeline.to_dicts() has the numbers."
        ) from error
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    _shade(axes, timeline)
    _draw_levels(axes, timeline, measured)
    _label_peak(axes, timeline)
    axes.set_xlim(0, max(1, len(timeline.instants) - 1))
    axes.set_ylim(0, axes.dataLim.ymax * 1.2)
    axes.set_ylabel("bytes alive (MiB)")
    axes.legend(loc="upper right", ncols=2, frameon=False, fontsize="small")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _shade(axes: Any, timeline: Timeline) -> None:
    for number, start, stop, _ in timeline.regions():
        axes.axvspan(start, stop, color=_REGIONS[number % 2], linewidth=0)
    forward = sum(1 for instant in timeline.instants if instant.phase == "forward")
    axes.axvline(forward, color="0.5", linewidth=0.8)
    axes.set_xticks([forward / 2, (forward + len(timeline.instants)) / 2])
    axes.set_xticklabels(["forward", "backward"])
    axes.tick_params(axis="x", length=0)


def _draw_levels(axes: Any, timeline: Timeline, measured: Measurement | None) -> None:
    levels = np.array([instant.nbytes for instant in timeline.instants], float) / _MIB
    axes.fill_between(
        range(len(levels)), 0, timeline.fixed_bytes / _MIB, color="0.85", label="fixed bytes"
    )
    if measured is not None and measured.forward_levels:
        forward = sum(1 for instant in timeline.instants if instant.phase == "forward")
        parts = [
            _aligned(np.array(measured.forward_levels, float) / _MIB, levels[:forward]),
            _aligned(np.array(measured.backward_levels, float) / _MIB, levels[forward:]),
        ]
        places = np.concatenate([parts[0][0], parts[1][0] + forward])
        found = np.concatenate([parts[0][1], parts[1][1]])
        axes.plot(places, found, color="tab:orange", linewidth=0.8, label="measured")
    axes.plot(levels, color="tab:blue", linewidth=1.2, label="predicted")
    if timeline.budget_bytes is not None:
        budget = timeline.budget_bytes / _MIB
        label = f"budget {format_bytes(timeline.budget_bytes)}"
        axes.axhline(budget, color="tab:red", linestyle="--", linewidth=1, label=label)


def _aligned(measured: Levels, predicted: Levels) -> tuple[Levels, Levels]:
    """Warp measured levels onto the places of predicted ones: the allocator names no ops.

    Dynamic time warping: of all ways to pair the two in order, the one with the least sum of
    differences. Returns place and level of every pair.
    """
    if measured.size * predicted.size > _MOST_PAIRS or not predicted.size:
        return np.linspace(0, predicted.size, measured.size), measured
    costs = np.empty((measured.size, predicted.size))
    above = np.concatenate([[0.0], np.full(predicted.size - 1, np.inf)])
    for row, level in enumerate(measured):
        total = np.cumsum(np.abs(predicted - level))
        before = np.concatenate([[0.0], total[:-1]])
        arrived = np.minimum(above, np.concatenate([[np.inf], above[:-1]]))
        above = costs[row] = total + np.minimum.accumulate(arrived - before)
    pairs = [(measured.size - 1, predicted.size - 1)]
    while pairs[-1] != (0, 0):
        row, place = pairs[-1]
        steps = [(row - 1, place - 1), (row - 1, place), (row, place - 1)]
        pairs.append(min((s for s in steps if min(s) >= 0), key=costs.__getitem__))
    rows, places = np.array(pairs[::-1], int).T
    return np.asarray(places, float), measured[rows]


def _label_peak(axes: Any, timeline: Timeline) -> None:
    peak = timeline.peak
    at = timeline.instants.index(peak)
    place = peak.module or peak.target.rsplit(".", 1)[-1]
    text = f"peak {format_bytes(peak.nbytes)}: {place}, {peak.phase}, {file_and_line(peak.source)}"
    left = at > len(timeline.instants) / 2
    axes.annotate(
        text,
        (at, peak.nbytes / _MIB),
        xytext=(-8 if left else 8, 10),
        textcoords="offset points",
        ha="right" if left else "left",
        fontsize="small",
        arrowprops={"arrowstyle": "-", "color": "0.3", "linewidth": 0.8},
    )
    axes.plot([at], [peak.nbytes / _MIB], "o", color="tab:blue", markersize=4)
