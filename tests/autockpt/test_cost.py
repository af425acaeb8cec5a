"""Costs: what is chosen, and that nothing of a user's cost is believed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import autockpt
from autockpt.errors import ProfileError
from autockpt.pipeline import lower_step
from autockpt.profiler import OpWork, Roofline
from autockpt.profiler.cost import cost_model
from autockpt.profiler.subject import Subject
from autockpt.profiler.timed import Timer
from solvers import Plan, simulate


def chain() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])


def test_roofline_is_the_stated_formula() -> None:
    work = OpWork(target="mm", flops=100_000, output_bytes=50_000)
    assert Roofline()(work) == 2_000 + 10_000 + 5_000
    assert Roofline(launch_ns=0, flops_per_second=1e9)(work) == 100_000 + 10_000


def test_an_unknown_cost_names_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"cost='flops'.*'time'.*'roofline'"):
        cost_model("flops")  # type: ignore[arg-type]


def test_a_cost_of_ones_own_decides_what_runs_again() -> None:
    asked: list[OpWork] = []

    def gelu_is_dear(work: OpWork) -> int:
        asked.append(work)
        return 10**9 if "gelu" in work.target and "backward" not in work.target else 1

    batch = (torch.ones(4096, 64),)
    model = autockpt.optimize(chain(), batch, memory_budget="70%", cost=gelu_is_dear)
    assert {work.target for work in asked} >= {
        "torch.nn.functional.gelu",
        "torch.nn.functional.linear",
    }
    plan, problem = model.autockpt.plan, model.autockpt.problem
    assert plan.recompute_cost < 10**9
    assert sum(op.cost == 10**9 for op in problem.ops) == 6


@pytest.mark.parametrize("answer", [-1, 0.5, None, True])
def test_a_cost_that_is_no_count_of_ns_is_refused(answer: object) -> None:
    wrong: Callable[[OpWork], int] = lambda work: answer  # type: ignore[assignment, return-value]  # noqa: E731
    with pytest.raises(ProfileError, match=f"cost of .* is {answer!r}.*int of at least 0"):
        autockpt.optimize(chain(), (torch.ones(8, 64),), memory_budget="70%", cost=wrong)


def test_a_cost_that_solvers_cannot_add_up_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"cost of .* is 10{30}: .*at most 2\*\*48"):
        autockpt.optimize(chain(), (torch.ones(8, 64),), memory_budget="70%", cost=lambda _: 10**30)
    most = autockpt.optimize(
        chain(), (torch.ones(4096, 64),), memory_budget="70%", cost=lambda _: 2**48
    )
    assert most.autockpt.plan.recompute_cost % 2**48 == 0


def test_a_cost_that_raises_is_blamed_and_not_the_op() -> None:
    def wrong(work: OpWork) -> int:
        return work.bytes  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(
        ProfileError, match=r"cost callable 'wrong' raised AttributeError"
    ) as caught:
        autockpt.optimize(chain(), (torch.ones(8, 64),), memory_budget="70%", cost=wrong)
    assert "no attribute 'bytes'" in str(caught.value)
    assert "Leave that part out" not in str(caught.value)


def test_a_region_costs_something_of_its_own_where_costs_are_times() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(4, 8)
    _, timed = lower_step(model, (x,), {}, None, cost="time")
    _, counted = lower_step(model, (x,), {}, None, cost="roofline")
    assert counted.region_cost == 0
    # Some tens of microseconds: a call under checkpoint and an unpack hook.
    assert 1_000 < timed.region_cost < 10_000_000
    plan = Plan.flat([(0, 2), (2, 4)])
    bare = replace(timed, region_cost=0)
    more = simulate(timed, plan).recompute_cost - simulate(bare, plan).recompute_cost
    assert more == 2 * timed.region_cost


@pytest.mark.parametrize("late", [False, True])
def test_the_time_up_to_the_last_pack_is_measured_where_costs_are_times(late: bool) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        if late:
            time.sleep(0.05)
        y = x.exp()  # Packs its result, and the sum packs nothing.
        if not late:
            time.sleep(0.05)
        return y.sum()

    x = torch.randn(8, 8)
    subject = Subject(
        name="op",
        target="op",
        call=call,
        args=(x,),
        kwargs={},
        differentiable=frozenset({id(x)}),
        written=frozenset(),
    )
    times = Timer(x.device).times(subject, [0], stops_inside=True)
    assert times.forward >= 50_000_000 > times.backward
    assert (times.stop >= 50_000_000) == late


def test_a_share_of_flops_says_how_far_an_op_has_run_where_costs_are_not_measured() -> None:
    """Of attention that draws all is packed but what the second of two products makes."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(32, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x).chunk(3, -1)
            found = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
            return found.square().mean()

    _, problem = lower_step(Attention(), (torch.randn(8, 64, 32),), {}, None, "roofline")
    op = next(op for op in problem.ops if op.target.endswith("attention"))
    assert op.stop_cost / op.cost == pytest.approx(0.5, abs=1e-4)
