"""Meters: exact, and silent."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import autockpt
from autockpt.errors import ProfileError
from autockpt.meters import meter

CPU = torch.device("cpu")


def test_the_peak_is_exact() -> None:
    def run() -> None:
        first = torch.zeros(1000)
        second = torch.zeros(500)
        del first
        torch.zeros(250)
        del second

    with meter(CPU) as watch:
        watch.mark("a")
        run()
        watch.mark("b")
    assert watch.span("a", "b").peak_bytes == 6000


def test_spans_are_relative_to_their_start() -> None:
    with meter(CPU) as watch:
        kept = [torch.zeros(1000)]
        watch.mark("a")
        kept.append(torch.zeros(10))
        torch.zeros(20)
        watch.mark("b")
    span = watch.span("a", "b")
    assert (span.peak_bytes, span.end_bytes) == (120, 40)


def test_a_running_profiler_is_said_to_be_in_the_way() -> None:
    with (
        torch.profiler.profile(),
        pytest.raises(ProfileError, match="profiler is running"),
        meter(CPU),
    ):
        pass


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ProfileError, match="'xla'"):
        meter(torch.device("xla"))


def test_nothing_is_written_to_stderr() -> None:
    code = "import torch, autockpt.meters as m\nwith m.meter(torch.device('cpu')): torch.ones(1)"
    environment = {k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stderr == ""


@dataclass
class Batch:
    x: torch.Tensor


def test_a_batch_in_an_object_counts() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

        def forward(self, batch: Batch) -> torch.Tensor:
            return self.layers(batch.x).square().mean()

    model, batch = Net(), Batch(torch.randn(64, 16))
    planned = autockpt.optimize(model, (batch,), memory_budget="100%")
    seen = autockpt.verify(model, planned, (batch,))
    assert seen.fixed_bytes == planned.autockpt.report.fixed_bytes
    assert seen.peak_bytes == seen.predicted_peak_bytes
