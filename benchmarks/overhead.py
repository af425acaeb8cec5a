"""What an optimized model costs where nothing runs again, and what a region costs beside its ops.

    python -m benchmarks.overhead

Plain and optimized steps in interleaved pairs, each once in front of the other. Two views of the
same pairs: the ratio of the medians, and the difference that a call makes in microseconds, which
does not depend on how long the step takes.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autockpt
from autockpt.regions.checkpointed import checkpointed
from benchmarks.common import show
from solvers import Plan
from tests import zoo
from tests.zoo import Case

PAIRS = 40


def main() -> None:
    """Print the ratio of step times under an ample budget, and the cost of a region."""
    show("An ample budget: no region, step time over plain", list(ample()), "overhead")
    show("Many regions of one cheap op: microseconds a region", list(regions()), "overhead_regions")


def ample() -> Iterator[dict[str, Any]]:
    """Steps of 50 ms and more."""
    for name, make in {
        "GPT-2, 12 layers": lambda: zoo.gpt2(layers=12, width=128, shape=(4, 128)),
        "ViT": zoo.vit,
        "ResNet": zoo.resnet,
        "UNet": zoo.unet,
    }.items():
        case = make()
        ours: Any = autockpt.optimize(
            copy.deepcopy(case.model),
            case.args,
            case.kwargs,
            loss=case.loss,
            memory_budget="100%",
            cost="roofline",
        )
        assert not ours.autockpt.plan.regions
        plain, found = pairs(step(case, case.model), step(case, ours))
        yield {
            "model": name,
            "modules": sum(1 for _ in case.model.modules()),
            "plain ms": 1e3 * statistics.median(plain),
            "ratio": statistics.median(b / a for a, b in zip(plain, found, strict=True)),
            "of minima": min(found) / min(plain),
            "key us": key_us(ours, case),
        }


def key_us(model: Any, case: Case) -> float:
    """What finding the plan of a call takes."""
    handle, times = model.autockpt, []
    for _ in range(200):
        start = time.perf_counter()
        handle._fitting(model, case.args, case.kwargs, ())
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def regions() -> Iterator[dict[str, Any]]:
    """A chain of cheap layers, each in a region of its own, and in a checkpoint of torch's."""
    depth = 64
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth)])
    batch = (torch.randn(4, 8),)
    case = Case(model, batch, {}, torch.sum)
    plan = Plan.flat([(2 * i, 2 * i + 2) for i in range(depth)])
    ours: Any = autockpt.optimize(
        copy.deepcopy(model), batch, memory_budget=2**30, cost="roofline", plan=plan
    )
    bare: Any = autockpt.optimize(
        copy.deepcopy(model), batch, memory_budget=2**30, cost="roofline", plan=plan
    )
    program = bare.autockpt._entries[0].step.program.forward
    assert program.__globals__["checkpointed"] is checkpointed
    program.__globals__["checkpointed"] = _torch_checkpoint
    for name, other in (("autockpt's", ours), ("torch's, weights not watched", bare)):
        plain, found = pairs(step(case, model), step(case, other))
        more = statistics.median(b - a for a, b in zip(plain, found, strict=True))
        yield {"regions": name, "plain ms": 1e3 * min(plain), "us a region": 1e6 * more / depth}


def _torch_checkpoint(region: Callable[..., Any], *arguments: Any, draws: bool) -> Any:
    return checkpoint(region, *arguments, use_reentrant=False, preserve_rng_state=draws)


def step(case: Case, model: nn.Module) -> Callable[[], None]:
    """A step as loops write it."""

    def run() -> None:
        output = model(*case.args, **case.kwargs)
        loss = output.loss if case.loss is None else case.loss(output)
        loss.backward()
        model.zero_grad()

    return run


def pairs(first: Callable[[], None], second: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Seconds of both, interleaved."""
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(PAIRS + 3):
        for which in (0, 1) if pair % 2 else (1, 0):
            start = time.perf_counter()
            (first, second)[which]()
            times[which].append(time.perf_counter() - start)
    return times[0][3:], times[1][3:]


if __name__ == "__main__":
    main()
