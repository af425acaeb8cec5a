"""What each class of plans is worth: flat regions, with prologues, with kept ops, nested.

    python -m benchmarks.classes [MODEL ...]

Costs are roofline's, so the figures are the same everywhere. A cell is recomputation as a share
of a forward; each class is searched as ``auto`` does, before and after local search.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from autockpt.pipeline import lower_step
from benchmarks.common import show
from solvers import Plan, bound, simulate
from solvers.judge.replay import Replay, replay_of
from solvers.plan import Region
from solvers.problem import Problem
from solvers.rotor import chain_of
from solvers.search.flat import best_flat, search_of
from solvers.search.keeping_search import with_any_kept
from solvers.search.local import fitted, improve, tidied
from solvers.search.nested import best_nested
from solvers.search.prologue_search import with_prologues, without_vain_prologues
from tests import zoo

SHARES = (0.8, 0.5, 0.3)
GPT2_MB = (300, 200, 137, 100, 66, 48)
PRICES = 800

Regions = tuple[Region, ...]


def main() -> None:
    """Print a row for each model and budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["gpt2_design", *zoo.ZOO])
    rows = [row for name in parser.parse_args().models for row in rows_of(name)]
    show("Recomputed share of a forward, by class of plans", rows, "classes")


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each budget of a model."""
    case = getattr(zoo, name)()
    _, problem = lower_step(case.model, case.args, case.kwargs, case.loss)
    plain = simulate(problem, Plan()).activation_peak_bytes
    asked = [int(share * plain) for share in SHARES]
    if name == "gpt2_design":
        asked = [megabytes * 1_000_000 for megabytes in GPT2_MB]
    for activations in asked:
        # Less the margin that plans are made for.
        budget = problem.fixed_bytes + int(0.995 * activations)
        yield {"model": name, "MB": activations / 1e6, **cells(problem, budget)}


def cells(problem: Problem, budget_bytes: int) -> dict[str, float | None]:
    """Give the share of each class, and the bound."""
    replay = replay_of(problem)
    room = budget_bytes - max(replay.bases)
    search = search_of(replay)
    asked = [budget_bytes + int(share * room) for share in (0, 0.005, 0.01, 0.02)]
    flat = [best_flat(replay, budget_bytes), *(search.run(more) for more in asked)]
    offered = with_prologues(search)
    again = [search.run(more, offered) for more in asked]
    kept_ones = with_any_kept(search)
    kept = [search.run(more, kept_ones) for more in asked]
    nested = [chain_of(replay).regions(budget_bytes), best_nested(replay, budget_bytes)]
    return {
        "flat": _best(replay, flat, budget_bytes),
        "prologues": _best(replay, again, budget_bytes),
        "kept ops": _best(replay, kept, budget_bytes),
        "nested": _best(replay, nested, budget_bytes),
        "bound": bound(problem, budget_bytes) / problem.forward_cost,
    }


def _best(replay: Replay, plans: Iterable[Regions | None], budget_bytes: int) -> float | None:
    costs = []
    for regions in plans:
        if regions is None:
            continue
        kept = without_vain_prologues(replay.problem, regions)
        fits = fitted(replay, kept, budget_bytes, PRICES)
        if fits is not None:
            better = tidied(replay, improve(replay, fits, budget_bytes, PRICES), budget_bytes)
            costs.append(replay.price(better)[1] / replay.forward_cost)
    return min(costs, default=None)


if __name__ == "__main__":
    main()
