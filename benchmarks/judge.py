"""Predicted peaks against the allocator's, before the first step is run.

python -m benchmarks.judge [MODEL ...] [--precision fp32 bf16]

Zoo x {plain, 80, 60, 50, 40, 30 %, least} x {auto, sqrt_n} x gradients {resident, fresh} x
{fp32, bfloat16 autocast around the forward}. Errors are of the measured activation peak. A cell
of ``auto`` whose peak is below 90 % of its budget is searched for a cheaper plan that fits, by
the integer program and by asking for more: one that exists was wasted.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import autockpt
from autockpt.settings import margin_bytes
from autockpt.step import Gradients, Measurement
from benchmarks.common import MB, show
from solvers import InfeasibleError, Prediction, Problem, simulate, solve
from tests.zoo import ZOO, Case

BUDGETS = ("plain", "80%", "60%", "50%", "40%", "30%", "least")
SOLVERS = ("auto", "sqrt_n")
GRADIENTS: tuple[Gradients, ...] = ("resident", "fresh")


class Autocast(nn.Module):
    """A model whose forward runs under bfloat16 autocast, as training loops write it."""

    def __init__(self, model: nn.Module, *, enabled: bool) -> None:
        super().__init__()
        self.model, self.enabled = model, enabled

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.context():
            return self.model(*args, **kwargs)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Give the mode that planning has to see as well."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.enabled)


def main() -> None:
    """Run the grid, print a table and a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(ZOO))
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    chosen = parser.parse_args()
    rows = list(grid({name: ZOO[name] for name in chosen.models}, chosen.precision))
    show("Predicted against measured peaks", rows, "judge")
    show("Summary", [summary(rows)], "judge_summary")
    show("Profiling GPT-2", [profiling()], "judge_profiling")


def grid(
    models: dict[str, Callable[[], Case]],
    precisions: list[str],
    budgets: tuple[str, ...] = BUDGETS,
    solvers: tuple[str, ...] = SOLVERS,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each cell of the grid; one without numbers where no plan is found."""
    for name, make in models.items():
        for precision in precisions:
            for budget in budgets:
                for solver in solvers[:1] if budget == "plain" else solvers:
                    key = {
                        "model": name,
                        "precision": precision,
                        "budget": budget,
                        "solver": "none" if budget == "plain" else solver,
                    }
                    yield from cells(key, make(), budget, solver, bf16=precision == "bf16")


def cells(
    key: dict[str, Any], case: Case, budget: str, solver: str, *, bf16: bool
) -> Iterator[dict[str, Any]]:
    """Yield the cells of one plan: gradients resident and fresh."""
    model = planned(case, budget, solver, bf16=bf16)
    if model is None:
        yield {**key, **cell(None, None, None), "wasted": False}
        return
    handle = model.model.autockpt
    prediction = simulate(handle.problem, handle.plan)
    for gradients in GRADIENTS:
        measured = autockpt.measure(
            model, case.args, case.kwargs, loss=case.loss, gradients=gradients
        )
        limit = None if budget == "plain" else handle.report.budget_bytes
        row = {**key, **cell(prediction, measured, limit), "wasted": False}
        # The budget holds for both ways of training: the higher of the two peaks uses it.
        if limit is not None and solver == "auto" and prediction.peak_bytes < 0.9 * limit:
            row["wasted"] = wasted(handle.problem, prediction.recompute_cost, limit)
        yield row


def wasted(problem: Problem, cost: int, limit: int) -> bool:
    """Tell whether a plan that fits is found that costs less."""
    target = limit - margin_bytes(limit, problem.fixed_bytes)
    asked = [("auto", int(share * target)) for share in (1.0, 1.02, 1.05, 1.1)]
    for solver, budget_bytes in (*asked, ("ilp", target), ("interval_dp", target)):
        try:
            found = simulate(problem, solve(problem, budget_bytes, solver))
        except InfeasibleError:
            continue
        if found.peak_bytes <= target and found.recompute_cost < cost:
            return True
    return False


def planned(case: Case, budget: str, solver: str, *, bf16: bool) -> Any:
    """Optimize a case; None where no plan is found."""
    context = Autocast(nn.Identity(), enabled=bf16).context
    arguments = (case.model, case.args, case.kwargs)
    with context():
        asked: int | str = {"plain": "100%"}.get(budget, budget)
        if budget == "least":
            asked = autockpt.minimum_budget(*arguments, loss=case.loss, cost="roofline")
        try:
            model = autockpt.optimize(
                *arguments, loss=case.loss, memory_budget=asked, solver=solver, cost="roofline"
            )
        except autockpt.InfeasibleError:
            return None
    return Autocast(model, enabled=bf16)


def cell(
    prediction: Prediction | None, measured: Measurement | None, budget_bytes: int | None
) -> dict[str, Any]:
    """Compare one prediction with one measurement."""
    if prediction is None or measured is None:
        return dict.fromkeys(("gradients", "predicted MB", "measured MB", "error %", "over budget"))
    predicted = prediction.resident_peak_bytes
    if measured.gradients == "fresh":
        predicted = prediction.fresh_peak_bytes
    error = (predicted - measured.peak_bytes) / measured.activation_peak_bytes
    over = budget_bytes is not None and measured.peak_bytes > budget_bytes
    return {
        "gradients": measured.gradients,
        "predicted MB": predicted / MB,
        "measured MB": measured.peak_bytes / MB,
        "error %": 100 * error,
        "over budget": over,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the numbers that the README quotes."""
    measured = [row for row in rows if row["error %"] is not None]
    errors = [abs(row["error %"]) for row in measured]
    worst = max(measured, key=lambda row: abs(row["error %"]))
    return {
        "cells": len(rows),
        "measured": len(measured),
        "no plan found": len(rows) - len(measured),
        "max error %": f"{max(errors):.4f}",
        "median error %": f"{statistics.median(errors):.4f}",
        "over budget": sum(row["over budget"] for row in measured),
        "wasted": sum(row["wasted"] for row in measured),
        "worst": " ".join(str(worst[name]) for name in ("model", "precision", "budget", "solver")),
    }


def profiling() -> dict[str, Any]:
    """Give the time and the memory of taking GPT-2's step apart."""
    from autockpt.meters import collector_off, meter

    case = ZOO["gpt2"]()
    start = time.perf_counter()
    found = autockpt.profile(case.model, case.args, case.kwargs)
    seconds = time.perf_counter() - start
    watch = meter(torch.device("cpu"))
    with collector_off(), watch:
        watch.mark("start")
        with torch.no_grad():
            case.model(*case.args, **case.kwargs)
        watch.mark("stop")
    return {
        "seconds": seconds,
        "largest storage MB": found.rows[0].nbytes / MB,
        "forward without grad MB": watch.span("start", "stop").peak_bytes / MB,
        "plain step MB": found.activation_bytes / MB,
    }


if __name__ == "__main__":
    main()
