"""Random modules, random batches, random budgets: equal to the bit and inside, or refused.

    python -m benchmarks.fuzz [--first 0] [--number 300] [--emit modules]

Seed k gives the same module, batch and budget everywhere (``tests/fuzzed.py``). Where no plan fits
the budget, the one that the refusal names is asked for. It has to do, unless a later step calls
more than the planned one did (a part that a draw leaves out): then the larger one that is named.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.common import RESULTS, show
from benchmarks.isolated import outcomes
from benchmarks.trial import BAD, Subject, Trial, attempt
from tests.fuzzed import draw

LIMIT_S = 120.0
MOST_TRIES = 4


def run(name: str, *, emit: str = "auto") -> Trial:
    """Try one seed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    drawn = draw(int(name))
    subject = Subject(model=drawn.model, args=drawn.args)
    trial = attempt(name, subject, emit=emit, budget=drawn.budget)
    for _ in range(MOST_TRIES):
        if not trial.minimum_bytes:
            break
        trial = attempt(name, subject, emit=emit, budget=trial.minimum_bytes)
    return trial


def sweep(seeds: Iterable[int], emit: str, workers: int = 1) -> Iterator[Trial]:
    """Try seeds in processes of their own."""
    tried = functools.partial(run, emit=emit)
    for name, found in outcomes(tried, list(map(str, seeds)), LIMIT_S, workers=workers):
        yield Trial(name=name, kind="crashed", reason=found) if isinstance(found, str) else found


def counts(trials: list[Trial]) -> dict[str, Any]:
    """How many went how."""
    kinds: Counter[str] = Counter(trial.kind for trial in trials)
    again = sum(trial.recomputed > 0 for trial in trials)
    return {
        "trials": len(trials),
        **{kind: kinds[kind] for kind in ("graph", "modules", "refused", *BAD)},
        "runs again": again / len(trials),
    }


def main() -> None:
    """Print counts, what is refused and what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--emit", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    trials = []
    for trial in sweep(range(given.first, given.first + given.number), given.emit, given.workers):
        trials.append(trial)
        if trial.kind not in ("graph", "modules"):
            print(f"{trial.kind}: {trial.name}: {trial.reason}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"fuzz_{given.emit}_trials.json"
    path.write_text(json.dumps([asdict(trial) for trial in trials], indent=1))
    show("Random modules at random budgets", [counts(trials)], f"fuzz_{given.emit}")


if __name__ == "__main__":
    main()
