"""What the rows of ``benchmarks.optimum`` say about what was promised."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Row = dict[str, Any]

# Two measured peaks are the same within this share; FLOPs and times within these.
_PEAK_SLACK = 1.005
_FLOPS_SLACK = 1e-4


def of_budgets(rows: Iterable[Row]) -> list[Row]:
    """Half the peak at hardly more FLOPs, and how far from the bound."""
    auto = [row for row in rows if row["solver"] == "auto"]
    found = []
    for budget in dict.fromkeys(row["budget"] for row in auto):
        here = [row for row in auto if row["budget"] == budget and row["FLOPs"] is not None]
        gaps = [row["gap"] for row in here if row["gap"] is not None]
        found += [
            _answer(f"{budget}: FLOPs, median (at half: at most 1.02)", _median(here, "FLOPs")),
            _answer(f"{budget}: step time, median (at half: at most 1.08)", _median(here, "time")),
            _answer(f"{budget}: models planned", len(here)),
            _answer(f"{budget}: gap to the bound, median", statistics.median(gaps or [0.0])),
            _answer(
                f"{budget}: gap above a quarter",
                ", ".join(r["model"] for r in here if r["gap"] is not None and r["gap"] > 0.25),
            ),
        ]
    return found


def of_hand(rows: Iterable[Row]) -> list[Row]:
    """Never more recomputation than by hand at the same peak, mostly a third less."""
    found = []
    for variant in dict.fromkeys(row["hand"] for row in rows):
        here = [row for row in rows if row["hand"] == variant and row.get("FLOPs") is not None]
        planned = [row for row in here if row["planned FLOPs"] is not None]
        more = [row["model"] for row in planned if _saved(row) < 0]
        third = [row["model"] for row in planned if _saved(row) >= 1 / 3]
        none = [row["model"] for row in here if row["planned FLOPs"] is None]
        found += [
            _answer(f"hand, {variant}: more recomputation than by hand (none)", ", ".join(more)),
            _answer(f"hand, {variant}: no plan at that peak (none)", ", ".join(none)),
            _answer(
                f"hand, {variant}: at least a third less (8 of 10)", f"{len(third)} of {len(here)}"
            ),
        ]
    return found


def _saved(row: Row) -> float:
    """Share of the recomputation by hand that the plan does not need."""
    if row["share"] is not None and row["planned share"] is not None:
        return 1 - float(row["planned share"]) / float(row["share"])
    by_hand, planned = row["FLOPs"] - 1, row["planned FLOPs"] - 1
    return 1 - planned / by_hand if by_hand > _FLOPS_SLACK else float(planned <= _FLOPS_SLACK)


def of_least(rows: Iterable[Row]) -> list[Row]:
    """A lower peak than any placement by hand, on every model."""
    rows = list(rows)
    lower = [r for r in rows if r["peak"] is not None and r["peak"] < (r["least by hand"] or 1)]
    return [_answer("least peak below hand's (all)", f"{len(lower)} of {len(rows)}")]


def of_torch(rows: Iterable[Row]) -> list[Row]:
    """At every peak that PyTorch's budget reaches below plain: no more FLOPs, less time."""
    reached = [row for row in rows if row.get("peak") is not None and row["peak"] < 1]
    planned = [row for row in reached if row["planned FLOPs"] is not None]
    more = [_cell(r) for r in planned if r["planned FLOPs"] > r["FLOPs"] * (1 + _FLOPS_SLACK)]
    over = [_cell(r) for r in planned if r["planned peak"] > r["peak"] * _PEAK_SLACK]
    timed = [row for row in reached if row["time over torch"] is not None]
    slower = [_cell(row) for row in timed if row["time over torch"] >= 1]
    missing = [_cell(row) for row in reached if row["planned FLOPs"] is None]
    return [
        _answer("torch: peaks reached below plain", len(reached)),
        _answer("torch: no plan at that peak (none)", ", ".join(missing)),
        _answer("torch: more FLOPs than its budget (none)", ", ".join(more)),
        _answer("torch: over its peak (none)", ", ".join(over)),
        _answer("torch: not less step time (none)", ", ".join(slower)),
        _answer("torch: step time over torch's, median", _median(timed, "time over torch")),
    ]


def of_blocks(rows: Iterable[Row]) -> list[Row]:
    """Of the gap between bound and plan, how much is the bound's."""
    found = []
    for row in rows:
        if row["schedule"] is None or row["auto"] is None or row["auto"] <= row["bound"]:
            continue
        own = (row["auto"] - row["schedule"]) / (row["auto"] - row["bound"])
        label = f"block of {row['model']} at {row['budget']}: share of the gap that is the plan's"
        found.append(_answer(label, max(0.0, own)))
    return found


def _cell(row: Row) -> str:
    return f"{row['model']} {row['torch budget']}"


def _median(rows: Iterable[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(values) if values else None


def _answer(question: str, answer: Any) -> Row:
    return {"what": question, "answer": answer if answer != "" else "none"}


SECTIONS: Mapping[str, Callable[[list[Row]], list[Row]]] = {
    "budgets": of_budgets,
    "hand": of_hand,
    "least": of_least,
    "torch": of_torch,
    "blocks": of_blocks,
}
