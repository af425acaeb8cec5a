"""What planning itself needs: a forward without grad and its largest op, inside the budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autockpt
from autockpt import meters, pipeline
from tests import zoo
from tests.helpers import peak_above_start


class Peaks(dict[str, int]):
    """Highest level of each stage above the level at its start."""

    def watch(self, stage: str) -> Callable[..., Any]:
        run: Callable[..., Any] = getattr(pipeline, stage)

        def watched(*args: Any, **kwargs: Any) -> Any:
            results = []
            self[stage] = peak_above_start(lambda: results.append(run(*args, **kwargs)))
            return results[0]

        return watched


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> Peaks:
    found = Peaks()
    for stage in ("record", "check"):
        monkeypatch.setattr(pipeline, stage, found.watch(stage))
    close = meters.CpuMeter.__exit__

    # The profiler has one user at a time; in this stage that is the meter of the ops.
    def exit_(meter: meters.CpuMeter, *error: object) -> None:
        close(meter, *error)
        found["profile"] = max(itertools.accumulate(meter._deltas, initial=0))

    monkeypatch.setattr(meters.CpuMeter, "__exit__", exit_)
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit", "swin"])
def test_no_step_of_planning_needs_more_than_the_budget(name: str, peaks: Peaks) -> None:
    case = zoo.ZOO[name]()
    model: Any = autockpt.optimize(
        case.model,
        case.args,
        case.kwargs,
        memory_budget="30%",
        loss=case.loss,
        cost="roofline",
        solver="interval_dp",
    )
    room = model.autockpt.report.budget_bytes - model.autockpt.problem.fixed_bytes
    assert set(peaks) == {"record", "check", "profile"}
    assert max(peaks.values()) <= room


def test_a_step_that_needs_many_times_what_planning_does(peaks: Peaks) -> None:
    block = (nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU())
    model: Any = autockpt.optimize(
        nn.Sequential(*[layer for _ in range(32) for layer in block]),
        (torch.randn(4096, 64),),
        memory_budget="25%",
        cost="roofline",
        solver="interval_dp",
    )
    report, fixed_bytes = model.autockpt.report, model.autockpt.problem.fixed_bytes
    assert report.plain_peak_bytes - fixed_bytes > 15 * max(peaks.values())
