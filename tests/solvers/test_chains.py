"""Solvers of chains against what is known of chains."""

from __future__ import annotations

from collections.abc import Iterator
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import Plan, Region, simulate, solve
from solvers.chains import equal_chain
from solvers.judge.replay import replay_of
from solvers.problem import Gradient
from solvers.rotor import chain_of
from solvers.treeverse import candidates, replays
from tests.solvers.checker import check
from tests.solvers.problems import Builder


def revolve(length: int, snapshots: int) -> int:
    """Forward steps of the optimal reversal (Griewank 1992), the first sweep apart."""
    repeats = 0
    while comb(snapshots + repeats, snapshots) < length:
        repeats += 1
    return repeats * length - comb(snapshots + repeats, snapshots + 1) if repeats else 0


@pytest.mark.parametrize("checkpoints", range(6))
def test_treeverse_is_the_known_optimum(checkpoints):
    for length in range(1, 40):
        assert replays(length, checkpoints) == revolve(length, checkpoints + 1)


@pytest.mark.parametrize("length", [3, 7, 12, 20])
def test_rotor_is_never_behind_treeverse_on_equal_chains(length):
    problem = equal_chain(ops=length, input_bytes=100, hidden_bytes=10**5, gradient_bytes=1)
    replay = replay_of(problem)
    for checkpoints, regions in enumerate(candidates(problem)):
        peak, cost = replay.price(regions)
        assert cost == revolve(length, checkpoints + 1)
        assert check(problem, Plan(regions=regions))[2] == cost
        if checkpoints < 6:
            plan = solve(problem, peak, "rotor")
            # The first input is there anyway, and gradients come and go: rotor sees the room.
            assert plan.peak_bytes <= peak
            assert plan.recompute_cost <= cost


@st.composite
def chains(draw, most_ops=5):
    """Chains of unequal ops: each saves its input, and maybe something hidden."""
    b = Builder()
    sizes = st.integers(1, 30)
    value = b.value(b.storage(8), 8, leaf=True)
    count = draw(st.integers(2, most_ops))
    for i in range(count):
        out = b.value(b.storage(draw(sizes), producer=i), draw(sizes))
        saved = [b.values[value].storage]
        own = draw(st.booleans())
        if own:
            saved.append(b.storage(draw(sizes), producer=i))
        cost = draw(st.integers(1, 9))
        b.op(
            inputs=(value,),
            outputs=(out,),
            saved=tuple(saved),
            packs=True,
            gradient_bytes=(b.values[value].gradient_bytes,),
            gradients=(Gradient(value=value, source=0),),
            cost=cost,
            stop_cost=cost if own else 0,
        )
        value = out
    return b.problem(value)


def nested_plans(low: int, high: int, parent: tuple[int, int]) -> Iterator[tuple[Region, ...]]:
    """Every set of nested regions between two positions, none of its parent's size."""
    yield ()
    for start in range(low, high):
        for stop in range(start + 1, high + 1):
            if (start, stop) == parent:
                continue
            for children in nested_plans(start, stop, (start, stop)):
                for rest in nested_plans(stop, high, parent):
                    yield (Region(start=start, stop=stop, children=children), *rest)


@settings(max_examples=25, deadline=None)
@given(chains())
def test_rotor_is_the_best_nested_plan_of_small_chains(problem):
    replay, size = replay_of(problem), len(problem.ops)
    prices = [replay.price(regions) for regions in nested_plans(0, size, (-1, -1))]
    for budget in sorted({peak for peak, _ in prices}):
        best = min(cost for peak, cost in prices if peak <= budget)
        plan = solve(problem, budget, "rotor")
        assert plan.recompute_cost == best
        assert simulate(problem, plan).peak_bytes <= budget


def test_rotor_serves_every_budget_from_one_table():
    problem = equal_chain(ops=20, input_bytes=4, hidden_bytes=4)
    chain = chain_of(replay_of(problem))
    assert chain is chain_of(replay_of(problem))
    costs = list(chain.rest[0].costs)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0
