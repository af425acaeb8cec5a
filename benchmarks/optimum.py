"""How near to the optimum: solvers, placement by hand and PyTorch's budget, over ten models.

    python -m benchmarks.optimum
    python -m benchmarks.optimum --models gpt2,vit --sections budgets,hand --pairs 0

Each cell is measured in a process of its own, one thread, and kept in ``results/optimum.json``:
a run that was cut short goes on where it was; ``--fresh`` forgets. Peaks and FLOPs are exact, and
step times are medians of interleaved pairs, on a machine that should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.answers import SECTIONS
from benchmarks.common import RESULTS, show
from benchmarks.models import MODELS

Row = dict[str, Any]

BUDGETS = ("50%", "30%")
SOLVERS = ("every_k", "chen_greedy", "treeverse", "min_cut", "rotor", "interval_dp", "auto")
HAND = ("layer", "sqrt", "0.5")
SHARES = (0.8, 0.5, 0.3, 0.2, 0.1, 0.0)
_SECONDS = 900


@dataclass(slots=True)
class Cells:
    """Cells by their description, measured where they are not yet, and kept in a file."""

    pairs: int
    found: dict[str, Row] = field(default_factory=dict)

    @property
    def path(self) -> Any:
        return RESULTS / "optimum.json"

    def load(self) -> None:
        """Take up what other runs found."""
        if self.path.exists():
            self.found = {**json.loads(self.path.read_text()), **self.found}

    def __call__(self, **cell: Any) -> Row:
        """Give a cell's numbers."""
        key = json.dumps(cell, sort_keys=True)
        if key in self.found:
            return self.found[key]
        command = json.dumps({**cell, "pairs": self.pairs})
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.cells", command],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode:
            row = {"failed": done.stderr.strip().splitlines()[-1]}
        else:
            row = json.loads(done.stdout.strip().splitlines()[-1])
        print(f"{key}: {row.get('failed') or 'done'}", file=sys.stderr, flush=True)
        if "failed" in row:
            return row
        self.found[key] = row
        self.load()
        RESULTS.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(self.found, indent=1))
        return row


def budget_rows(
    cells: Cells, models: Iterable[str], solvers: Iterable[str], cost: str
) -> Iterator[Row]:
    """Every solver at half and at 30 % of the activation peak, and the bound."""
    for model in models:
        for budget in BUDGETS:
            for solver in solvers:
                cell = cells(model=model, kind="planned", budget=budget, solver=solver, cost=cost)
                yield {"model": model, "budget": budget, "solver": solver, **_shown(cell)}


def hand_rows(cells: Cells, models: Iterable[str], variants: Iterable[str]) -> Iterator[Row]:
    """Placement by hand, and a plan within the peak that it was measured at."""
    for model in models:
        for variant in variants:
            placed = cells(model=model, kind="hand", variant=variant)
            if "failed" in placed:
                yield {"model": model, "hand": variant, **_shown(placed)}
                continue
            plan = cells(model=model, kind="planned", budget=placed["bytes"])
            yield {
                "model": model,
                "hand": variant,
                "peak": placed["peak"],
                "FLOPs": placed["FLOPs"],
                "time": placed["time"],
                "share": placed["share"],
                **{
                    f"planned {name}": plan.get(name) for name in ("peak", "FLOPs", "time", "share")
                },
                "bound": plan.get("bound"),
            }


def least_rows(cells: Cells, models: Iterable[str], variants: Iterable[str]) -> Iterator[Row]:
    """The least peak by hand, and the least planned."""
    for model in models:
        hand = [cells(model=model, kind="hand", variant=variant) for variant in variants]
        plan = cells(model=model, kind="planned", budget="least")
        yield {
            "model": model,
            "least by hand": min((cell["peak"] for cell in hand if "peak" in cell), default=None),
            **_shown(plan),
        }


def torch_rows(cells: Cells, models: Iterable[str], shares: Iterable[float]) -> Iterator[Row]:
    """PyTorch's budget, and at each peak that it reaches plans: one by FLOPs, one by time."""
    for model in models:
        for share in shares:
            theirs = cells(model=model, kind="compiled", share=share)
            row = {"model": model, "torch budget": share}
            if "failed" in theirs:
                yield {**row, "failed": theirs["failed"]}
                continue
            plan = cells(model=model, kind="planned", budget=theirs["bytes"], cost="flops")
            duel = cells(model=model, kind="duel", share=share, budget=theirs["bytes"])
            yield {
                **row,
                "peak": theirs["peak"],
                "FLOPs": theirs["FLOPs"],
                "time": theirs["time"],
                "planned peak": plan.get("peak"),
                "planned FLOPs": plan.get("FLOPs"),
                "time over torch": duel.get("time over torch"),
                "failed": plan.get("failed") or duel.get("failed"),
            }


def block_rows(cells: Cells, models: Iterable[str]) -> Iterator[Row]:
    """One layer of each model alone: whether plan or bound is loose."""
    for model in models:
        for percent in (80, 60, 40):
            cell = cells(model=model, kind="block", percent=percent)
            yield {"model": model, "budget": f"{percent}%", **cell}


def _shown(cell: Row) -> Row:
    names = ("peak", "FLOPs", "time", "share", "bound", "regions", "solve seconds", "failed")
    row = {name: cell.get(name) for name in names}
    if cell.get("share") is not None and cell.get("bound"):
        row["gap"] = cell["share"] / cell["bound"] - 1
    else:
        row["gap"] = None
    if "infeasible" in cell:
        row["failed"] = f"none below {cell['infeasible'] / 1e6:.1f} MB"
    return row


def _even(rows: Iterable[Row]) -> list[Row]:
    """Give every row all columns: one that failed has few."""
    rows = list(rows)
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def main() -> None:
    """Measure what was asked for, print a table a section, and what it answers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas between")
    parser.add_argument("--sections", default="budgets,hand,least,torch,blocks")
    parser.add_argument("--solvers", default=",".join(SOLVERS))
    parser.add_argument("--cost", default="roofline", help="of section budgets; time is the user's")
    parser.add_argument("--hand", default=",".join(HAND), help="layer, sqrt, or a share of layers")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="PyTorch's budgets")
    parser.add_argument("--pairs", type=int, default=5, help="of timed steps; 0 takes no times")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    options = parser.parse_args()
    cells = Cells(options.pairs)
    if not options.fresh:
        cells.load()
    models = options.models.split(",")
    makers = {
        "budgets": lambda: budget_rows(cells, models, options.solvers.split(","), options.cost),
        "hand": lambda: hand_rows(cells, models, options.hand.split(",")),
        "least": lambda: least_rows(cells, models, options.hand.split(",")),
        "torch": lambda: torch_rows(
            cells, models, [float(share) for share in options.shares.split(",")]
        ),
        "blocks": lambda: block_rows(cells, models),
    }
    answers: list[Row] = []
    for section in options.sections.split(","):
        rows = _even(makers[section]())
        show(f"optimum: {section}", rows, f"optimum_{section}")
        answers += SECTIONS[section](rows)
    show("What was to be shown", answers, "optimum_answers")


if __name__ == "__main__":
    main()
