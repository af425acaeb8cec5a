"""Solvers side by side: what each makes of a model at several budgets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from autockpt.batch import checked_batch
from autockpt.capture.clone import clone_module
from autockpt.pipeline import lower_step
from autockpt.profiler.cost import CostChoice
from autockpt.reports.tables import to_text
from autockpt.runtime.swap import release
from autockpt.settings import Loss
from autockpt.units import format_bytes, parse_budget
from solvers import SOLVERS, InfeasibleError, Plan, PlanError, Problem, bound, simulate, solve
from solvers.search.blocks import blocks, grouped

BUDGETS = ("80%", "65%", "50%", "40%", "30%", "20%")
COMPARED = ("every_k", "chen_greedy", "treeverse", "min_cut", "rotor", "interval_dp", "auto")
PLAIN, BY_HAND = "plain", "a block a region"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One solver at one budget; predicted, not measured.

    Attributes
    ----------
    solver : str
        A name in ``SOLVERS``, ``"plain"``, or ``"a block a region"``, as people place
        checkpoints by hand.
    budget_text : str
        As it was asked for; empty for the two that know no budget.
    budget_bytes : int or None
        Peak not to exceed, fixed bytes included.
    activation_peak_bytes : int or None
        Of the plan, gradients resident; None if none was found.
    recompute_cost : int or None
    regions : int
    status : str
        As in ``Plan``, or ``"none found"``.
    seconds : float
    reason : str
        Why no plan was found: that of the solver's error.
    """

    solver: str
    budget_text: str = ""
    budget_bytes: int | None = None
    activation_peak_bytes: int | None = None
    recompute_cost: int | None = None
    regions: int = 0
    status: str = "none found"
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What no schedule of any kind can go below at a budget; cost None if none fits."""

    budget_text: str
    budget_bytes: int
    cost: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Solvers and budgets, and the bound at each budget.

    Attributes
    ----------
    entries : tuple of Entry
        The plain step and the placement by hand first, then by budget, the largest first.
    bounds : tuple of Bound
    fixed_bytes, plain_activation_bytes : int
    forward_cost : int
        What shares are of.
    """

    entries: tuple[Entry, ...]
    bounds: tuple[Bound, ...]
    fixed_bytes: int
    plain_activation_bytes: int
    forward_cost: int

    def share(self, cost: int) -> float:
        """Return a cost as a share of one plain forward."""
        return cost / self.forward_cost if self.forward_cost else 0.0

    def of(self, solver: str) -> tuple[Entry, ...]:
        """Return the entries of a solver."""
        return tuple(entry for entry in self.entries if entry.solver == solver)

    def table(self) -> Table:
        """Return a table of recompute shares: a row a budget, a column a solver; * is optimal."""
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
        table.title = "Recomputed share of a forward"
        table.add_column("budget", justify="right", no_wrap=True)
        solvers = tuple(dict.fromkeys(e.solver for e in self.entries if e.budget_text))
        for solver in (*solvers, "bound"):
            table.add_column(solver, justify="right", no_wrap=True)
        for limit in self.bounds:
            at = {e.solver: e for e in self.entries if e.budget_bytes == limit.budget_bytes}
            least = "none fits" if limit.cost is None else f"{self.share(limit.cost):.3f}"
            table.add_row(limit.budget_text, *(self._cell(at[name]) for name in solvers), least)
        seconds = (sum(entry.seconds for entry in self.of(name)) for name in solvers)
        table.add_row("seconds", *(f"{taken:.1f}" for taken in seconds), "", style="dim")
        for name in (PLAIN, BY_HAND):
            for entry in self.of(name):
                table.caption = f"{table.caption or ''}{self._point(entry)}. "
        return table

    def _cell(self, entry: Entry) -> str:
        if entry.recompute_cost is None:
            return "-"
        mark = "*" if entry.status == "optimal" else ""
        return f"{self.share(entry.recompute_cost):.3f}{mark}"

    def _point(self, entry: Entry) -> str:
        peak, cost = entry.activation_peak_bytes or 0, entry.recompute_cost or 0
        return f"{entry.solver}: {format_bytes(peak)}, {self.share(cost):.3f}"

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw activation peak against recompute share, the bound as a line.

        Parameters
        ----------
        path : str or Path, optional
            Where to write the picture; the ending says what kind.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ImportError
            Without matplotlib, which ``pip install autockpt[plots]`` brings.
        """
        from autockpt.reports.pareto import plot_comparison

        return plot_comparison(self, path)

    def to_json(self) -> str:
        """Return everything as JSON, recompute shares included."""
        data = asdict(self)
        for row in data["entries"]:
            cost = row["recompute_cost"]
            row["recompute_share"] = None if cost is None else self.share(cost)
        for row in data["bounds"]:
            row["share"] = None if row["cost"] is None else self.share(row["cost"])
        return json.dumps(data, indent=1)

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        return to_text(self.table())


def compare(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budgets: Sequence[SupportsIndex | str] = BUDGETS,
    solvers: Sequence[str] = COMPARED,
    loss: Loss | None = None,
    cost: CostChoice = "roofline",
) -> Comparison:
    """Plan one step with several solvers at several budgets.

    Parameters
    ----------
    model : nn.Module
        Left as it is.
    args, kwargs : sequence, mapping
        One batch.
    budgets : sequence of int or str
        As ``memory_budget`` of ``optimize``, without its margin.
    solvers : sequence of str
        Names in ``solvers.SOLVERS``.
    loss, cost
        As for ``optimize``.

    Returns
    -------
    Comparison
        ``table()``, ``plot()``, ``to_json()``. Of one solver a larger budget never costs more:
        a plan found for a smaller one serves it too.

    Raises
    ------
    CaptureError, ProfileError, BudgetError
    TypeError
        If budgets or solvers are a string, which would be read letter by letter.
    ValueError
        If there is no such solver.

    Examples
    --------
    >>> import torch
    >>> layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
    >>> found = compare(
    ...     nn.Sequential(*layers),
    ...     (torch.ones(512, 64),),
    ...     budgets=("80%", "60%"),
    ...     solvers=("every_k", "auto"),
    ... )
    >>> [entry.solver for entry in found.entries]
    ['plain', 'a block a region', 'every_k', 'auto', 'every_k', 'auto']
    """
    if isinstance(budgets, str):
        raise TypeError(f"budgets={budgets!r} is one budget: write budgets=({budgets!r},).")
    if isinstance(solvers, str):
        raise TypeError(f"solvers={solvers!r} is one solver: write solvers=({solvers!r},).")
    unknown = [name for name in solvers if name not in SOLVERS]
    if unknown:
        raise ValueError(f"There is no solver {unknown[0]!r}. Use some of {', '.join(SOLVERS)}.")
    batch = checked_batch(args, kwargs)
    clone = release(clone_module(model))
    _, problem = lower_step(clone, *batch, loss, cost)
    return compare_problem(problem, budgets=budgets, solvers=solvers)


def compare_problem(
    problem: Problem,
    *,
    budgets: Sequence[SupportsIndex | str] = BUDGETS,
    solvers: Sequence[str] = COMPARED,
) -> Comparison:
    """Plan a problem with several solvers at several budgets; see ``compare``."""
    plain = simulate(problem, Plan()).activation_peak_bytes
    asked = [parse_budget(budget, problem.fixed_bytes, plain) for budget in budgets]
    limits = sorted({b.peak_bytes: b.text for b in asked}.items())
    with _progress(len(limits) * (len(solvers) + 1)) as advance:
        entries: list[Entry] = []
        for name in solvers:
            entries += _rising(problem, name, limits, advance)
        bounds = []
        for peak_bytes, text in reversed(limits):
            advance("bound", text)
            bounds.append(_bound(problem, peak_bytes, text))
    order = {name: k for k, name in enumerate(solvers)}
    entries.sort(key=lambda entry: (-(entry.budget_bytes or 0), order[entry.solver]))
    return Comparison(
        entries=(*_without_budget(problem), *entries),
        bounds=tuple(bounds),
        fixed_bytes=problem.fixed_bytes,
        plain_activation_bytes=plain,
        forward_cost=problem.forward_cost,
    )


def _without_budget(problem: Problem) -> Iterator[Entry]:
    for name, regions in ((PLAIN, ()), (BY_HAND, grouped(problem, blocks(problem), 1))):
        found = simulate(problem, Plan(regions=regions))
        yield Entry(
            solver=name,
            activation_peak_bytes=found.activation_peak_bytes,
            recompute_cost=found.recompute_cost,
            regions=len(regions),
            status="feasible",
        )


def _rising(
    problem: Problem,
    name: str,
    limits: Sequence[tuple[int, str]],
    advance: Callable[[str, str], None],
) -> Iterator[Entry]:
    """Yield a solver's entries for rising budgets; what fitted a smaller one is kept if cheaper."""
    best: Entry | None = None
    for peak_bytes, text in limits:
        advance(name, text)
        entry = _entry(problem, name, peak_bytes, text)
        if best is not None and best.recompute_cost is not None:
            dearer = entry.recompute_cost is None or entry.recompute_cost > best.recompute_cost
            if dearer:
                entry = replace(
                    best, budget_bytes=peak_bytes, budget_text=text, seconds=entry.seconds
                )
        best = entry
        yield entry


def _entry(problem: Problem, name: str, peak_bytes: int, text: str) -> Entry:
    started = time.perf_counter()
    try:
        plan = solve(problem, peak_bytes, name)
    except (InfeasibleError, PlanError) as error:
        # Some solvers take no problem of more than a few ops.
        return Entry(
            solver=name,
            budget_text=text,
            budget_bytes=peak_bytes,
            seconds=time.perf_counter() - started,
            reason=str(error),
        )
    seconds = time.perf_counter() - started
    found = simulate(problem, plan)
    return Entry(
        solver=name,
        budget_text=text,
        budget_bytes=peak_bytes,
        activation_peak_bytes=found.activation_peak_bytes,
        recompute_cost=found.recompute_cost,
        regions=sum(1 for _ in plan.walk()),
        status=plan.status,
        seconds=seconds,
    )


def _bound(problem: Problem, peak_bytes: int, text: str) -> Bound:
    try:
        cost = bound(problem, peak_bytes)
    except InfeasibleError:
        return Bound(budget_text=text, budget_bytes=peak_bytes, cost=None)
    return Bound(budget_text=text, budget_bytes=peak_bytes, cost=cost)


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[str, str], None]]:
    """Yield what moves a bar on stderr; silent where that is no terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("compare", total=steps)

        def advance(solver: str, budget: str) -> None:
            bar.update(task, advance=1, description=f"{solver} at {budget}")

        yield advance
