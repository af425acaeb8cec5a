"""The ten models of the zoo at two budgets: peak, FLOPs and step time against the plain step.

    python -m benchmarks.zoo

Peaks and FLOPs are exact. Times are medians of interleaved pairs on whatever machine this runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, cast

import autockpt
from autockpt.runtime.handle import Handle
from benchmarks.common import MB, flops, show, time_ratio, with_model
from tests.zoo import ZOO

BUDGETS = ("50%", "30%")


def main() -> None:
    """Print a row for each model and budget, then the medians."""
    rows = list(cells())
    medians = [
        {
            "model": "median",
            "budget": budget,
            **{
                name: statistics.median(row[name] for row in rows if row["budget"] == budget)
                for name in ("peak", "FLOPs", "time", "runs again", "bound")
            },
        }
        for budget in BUDGETS
    ]
    show("Activation peak, FLOPs and step time, planned over plain", rows, "zoo")
    show("Medians", medians, "zoo_medians")


def cells() -> Iterator[dict[str, Any]]:
    """Optimize each model as a user would, with measured costs."""
    for name, make in ZOO.items():
        for budget in BUDGETS:
            case = make()
            call = (case.model, case.args, case.kwargs)
            model = autockpt.optimize(*call, loss=case.loss, memory_budget=budget)
            planned = with_model(case, model)
            seen = autockpt.verify(case.model, model, case.args, case.kwargs, loss=case.loss)
            plain_peak = seen.plain_peak_bytes - seen.fixed_bytes
            report = cast(Handle, model.autockpt).report
            yield {
                "model": name,
                "budget": budget,
                "plain MB": plain_peak / MB,
                "peak": (seen.peak_bytes - seen.fixed_bytes) / plain_peak,
                "FLOPs": flops(planned) / flops(case),
                "time": time_ratio(case, planned, pairs=9),
                "runs again": report.recompute_share,
                "bound": report.bound_share or 0.0,
                "bits": "equal" if seen.same_bits else "differ",
            }


if __name__ == "__main__":
    main()
