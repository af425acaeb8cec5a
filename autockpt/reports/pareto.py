"""Picture of a comparison: what memory costs in recomputation, solver by solver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autockpt.compare import Comparison

_MIB = 2**20
_MARKERS = "osD^vPXp"
_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:cyan", "tab:purple", "tab:brown", "tab:pink")


def plot_comparison(comparison: Comparison, path: str | Path | None = None) -> Any:
    """Draw activation peak against recompute share.

    Parameters
    ----------
    comparison : Comparison
    path : str or Path, optional
        Where to write the picture; the ending says what kind.

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
            "Drawing a comparison takes matplotlib: pip install 'autockpt[plots]'. Without it, "
            "comparison.to_json() has the numbers."
        ) from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    _draw_bound(axes, comparison)
    planned = dict.fromkeys(entry.solver for entry in comparison.entries if entry.budget_text)
    for k, solver in enumerate(planned):
        _draw_solver(axes, comparison, solver, k)
    for entry in (entry for entry in comparison.entries if not entry.budget_text):
        point = _point(comparison, entry.activation_peak_bytes, entry.recompute_cost)
        axes.plot(*point, "*", color="black", markersize=12, zorder=4)
        offset, side = ((9, 3), "left") if entry.recompute_cost else ((-4, 9), "right")
        axes.annotate(entry.solver, point, xytext=offset, textcoords="offset points", ha=side)
    axes.set_xlabel("activation peak (MiB)")
    axes.set_ylabel("recomputed share of a forward")
    axes.set_xlim(left=0)
    axes.set_ylim(-0.02, _top(comparison))
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right", frameon=False)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _top(comparison: Comparison) -> float:
    """Return the share at the upper edge: what a solver far behind the best does is cut off."""
    cheapest: dict[str, float] = {}
    for entry in comparison.entries:
        if entry.recompute_cost is not None:
            share = comparison.share(entry.recompute_cost)
            least = cheapest.get(entry.budget_text, share)
            cheapest[entry.budget_text] = min(share, least)
    by_hand = max(comparison.share(e.recompute_cost or 0) for e in comparison.entries[:2])
    return 1.25 * max(0.1, by_hand, *cheapest.values())


def _point(comparison: Comparison, peak: int | None, cost: int | None) -> tuple[float, float]:
    return (peak or 0) / _MIB, comparison.share(cost or 0)


def _draw_bound(axes: Any, comparison: Comparison) -> None:
    points = [
        _point(comparison, bound.budget_bytes - comparison.fixed_bytes, bound.cost)
        for bound in comparison.bounds
        if bound.cost is not None
    ]
    # At the plain step's peak nothing has to run again.
    points.append(_point(comparison, comparison.plain_activation_bytes, 0))
    x, y = zip(*sorted(points), strict=True)
    axes.plot(x, y, color="0.35", linestyle="--", label="bound, any schedule")
    axes.fill_between(x, y, color="0.93", zorder=0)


def _draw_solver(axes: Any, comparison: Comparison, solver: str, k: int) -> None:
    points = [
        _point(comparison, entry.activation_peak_bytes, entry.recompute_cost)
        for entry in comparison.of(solver)
        if entry.recompute_cost is not None
    ]
    if not points:
        return
    x, y = zip(*sorted(set(points)), strict=True)
    best = solver == "auto"
    axes.plot(
        x,
        y,
        marker=_MARKERS[k % len(_MARKERS)],
        markersize=5,
        linewidth=2 if best else 1,
        color="tab:red" if best else _COLORS[k % len(_COLORS)],
        alpha=1 if best else 0.75,
        zorder=3 if best else 2,
        label=solver,
    )
