"""The GPT-2 and the blocks that DESIGN names: least budgets, recomputation, FLOPs, all measured.

python -m benchmarks.design
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import autockpt
from benchmarks.common import MB, by_hand, flops, show, with_model
from tests.zoo import Case, gpt2_design, seed_blocks

GPT2_MB = (300, 200, 137, 100, 66, 59, 55, 48)


def main() -> None:
    """Print both tables."""
    show("GPT-2, 12 layers, width 256, 4 x 256 tokens", gpt2_rows(), "gpt2")
    show("The seed's blocks, batch 4,096", seed_rows(), "seed")


def gpt2_rows() -> Iterator[dict[str, Any]]:
    """One row a budget; the first is plain, the second one region a layer by hand."""
    plain = gpt2_design()
    measured = autockpt.measure(*_call(plain))
    plain_flops = flops(plain)
    yield _row("plain", plain, plain_flops)
    yield _row("a layer a region", by_hand(gpt2_design, ("transformer", "h")), plain_flops)
    for megabytes in GPT2_MB:
        yield _planned(gpt2_design, measured.fixed_bytes, int(megabytes * MB), plain_flops)


def seed_rows() -> Iterator[dict[str, Any]]:
    """24 and 100 blocks: plain, one region a block as in the listing, and planned."""
    for blocks, ratio in ((24, 4.0), (100, 10.0)):
        plain = seed_blocks(blocks)
        measured = autockpt.measure(*_call(plain))
        plain_flops = flops(plain)
        peak = measured.activation_peak_bytes
        yield _row(f"{blocks} plain", plain, plain_flops)
        hand = by_hand(partial(seed_blocks, blocks), ())
        yield _row(f"{blocks} a block a region", hand, plain_flops)
        for times in (ratio, ratio + 1, 2 * ratio):
            row = _planned(
                partial(seed_blocks, blocks),
                measured.fixed_bytes,
                int(peak / times),
                plain_flops,
            )
            yield {**row, "plan": f"{blocks} at 1/{times:g}"}


def _call(case: Case) -> tuple[Any, ...]:
    return case.model, case.args, case.kwargs


def _row(name: str, case: Case, plain_flops: int, **more: Any) -> dict[str, Any]:
    measured = autockpt.measure(*_call(case), loss=case.loss)
    return {
        "plan": name,
        "budget MB": None,
        "predicted MB": None,
        "measured MB": measured.activation_peak_bytes / MB,
        "FLOPs": flops(case) / plain_flops,
        "recompute": None,
        "bound": None,
        "seconds": None,
        **more,
    }


def _planned(
    make: Callable[[], Case], fixed_bytes: int, activations: int, plain_flops: int
) -> dict[str, Any]:
    case = make()
    start = time.perf_counter()
    try:
        model = autockpt.optimize(
            *_call(case), loss=case.loss, memory_budget=fixed_bytes + activations, cost="roofline"
        )
    except autockpt.InfeasibleError as error:
        return {
            "plan": "none found",
            "budget MB": activations / MB,
            "predicted MB": ((error.minimum_bytes or 0) - fixed_bytes) / MB,
            "measured MB": None,
            "FLOPs": None,
            "recompute": None,
            "bound": None,
            "seconds": time.perf_counter() - start,
        }
    seconds = time.perf_counter() - start
    report = model.autockpt.report
    return _row(
        model.autockpt.plan.solver,
        with_model(case, model),
        plain_flops,
        **{
            "budget MB": activations / MB,
            "predicted MB": (report.peak_bytes - fixed_bytes) / MB,
            "recompute": report.recompute_share,
            "bound": report.bound_share,
            "seconds": seconds,
        },
    )


if __name__ == "__main__":
    main()
