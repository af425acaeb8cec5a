"""Running statistics in regions: a replay works on copies, which the judge counts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autockpt
from autockpt.capture import record
from autockpt.lower import lower
from autockpt.profiler import profile
from autockpt.rewrite import rewrite
from autockpt.step import measure
from solvers.judge.holding import alive_at_peak
from solvers.plan import Plan, Region
from solvers.simulate import simulate
from tests.helpers import equal
from tests.test_judge import Emitted

ROWS, WIDTH = 32, 64


def _loss(y: Tensor) -> Tensor:
    return y.square().mean()


# Ops: three times linear, batch_norm, tanh; counters and loss behind them.
@pytest.mark.parametrize(
    "regions",
    [
        (Region(start=1, stop=3),),
        (Region(start=0, stop=9),),
        (Region(start=0, stop=4), Region(start=4, stop=9)),
        (Region(start=0, stop=8, children=(Region(start=1, stop=4), Region(start=4, stop=8))),),
    ],
)
def test_the_copies_are_foreseen_to_the_byte(regions: tuple[Region, ...]) -> None:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh())
        for _ in range(3)
    ]
    model = nn.Sequential(*blocks).train()
    x = torch.randn(ROWS, WIDTH)
    capture, recorded = record(model, (x,), {}, _loss)
    facts = profile(capture, model, (x,), {}, closures=recorded.closures, cost="roofline")
    problem, plan = lower(capture, facts), Plan(regions=regions)
    copied = {problem.storages[s].nbytes for op in problem.ops for s in op.copied}
    assert copied == {WIDTH * 4}
    predicted = simulate(problem, plan)
    emitted = Emitted(model, capture, rewrite(capture, plan, root=model))
    for gradients in ("resident", "fresh"):
        measured = measure(emitted, (x,), loss=_loss, gradients=gradients)
        assert getattr(predicted, f"{gradients}_peak_bytes") == measured.peak_bytes
    holding = alive_at_peak(problem, plan)
    parts = sum(held.nbytes for held in holding.held) + holding.fixed_bytes
    assert parts + holding.gradient_bytes + holding.workspace_bytes == predicted.peak_bytes


def test_statistics_that_come_out_as_they_were_are_written_all_the_same() -> None:
    """With a momentum of 1 the statistics of the batch that was seen last are what they are."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(WIDTH, momentum=1.0) for _ in range(4)]
    plain = nn.Sequential(
        *[layer for norm in norms for layer in (nn.Linear(WIDTH, WIDTH), norm, nn.Tanh())]
    ).train()
    x = torch.randn(ROWS, WIDTH)
    plain(x)
    planned = autockpt.optimize(
        copy.deepcopy(plain), (x,), memory_budget="70%", cost="roofline", loss=_loss
    )
    assert "statistic(" in planned.autockpt.code
    for model in (plain, planned):
        for shift in range(3):
            _loss(model(x + shift)).backward()
    for a, b in zip(plain.buffers(), planned.buffers(), strict=True):
        assert equal(a, b)
