"""Awkward architectures of transformers and diffusers, optimized one way or the other.

    python -m benchmarks.architectures [--emit modules] [NAME ...]

Each is asked for half of its activations, and for more where no plan fits that. Everything that
two steps leave behind is compared to the bit with the plain model's, and the peak is measured.
"""

from __future__ import annotations

import argparse
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.common import show
from benchmarks.isolated import outcomes
from benchmarks.trial import BAD, Subject, Trial, attempt
from tests.awkward import AWKWARD

LIMIT_S = 240.0
BUDGETS = ("50%", "60%", "75%", "90%")


def run(name: str, *, emit: str = "auto") -> dict[str, Any]:
    """Try one architecture at the first budget that has a plan."""
    torch.set_num_threads(1)
    logging.disable()
    started = time.perf_counter()
    trial = Trial(name=name, kind="refused")
    budget = ""
    for budget in BUDGETS:
        case = AWKWARD[name]()
        subject = Subject(model=case.model, args=case.args, kwargs=case.kwargs, loss=case.loss)
        trial = attempt(name, subject, emit=emit, budget=budget)
        if not (trial.kind == "refused" and trial.infeasible):
            break
    peak, allowed = trial.peak_bytes, trial.budget_bytes
    return {
        "model": name,
        "regions": trial.kind,
        "budget": budget,
        "peak MB": peak / 1e6,
        "budget MB": allowed / 1e6,
        "ops again": trial.recomputed,
        "seconds": time.perf_counter() - started,
        "why": trial.reason,
    }


def sweep(names: Sequence[str], emit: str, workers: int = 1) -> Iterator[dict[str, Any]]:
    """Try architectures in processes of their own."""
    for name, found in outcomes(functools.partial(run, emit=emit), names, LIMIT_S, workers=workers):
        yield (
            {"model": name, "regions": "crashed", "why": found} if isinstance(found, str) else found
        )


def main() -> None:
    """Print a row for each architecture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(AWKWARD))
    parser.add_argument("--emit", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    rows = []
    for row in sweep(given.names, given.emit, given.workers):
        rows.append(row)
        if row["regions"] in ("refused", *BAD) or row["why"]:
            print(f"{row['model']}: {row['regions']}: {row['why']}", flush=True)
    short = [{key: value for key, value in row.items() if key != "why"} for row in rows]
    show("Architectures chosen for being awkward", short, f"architectures_{given.emit}")


if __name__ == "__main__":
    main()
