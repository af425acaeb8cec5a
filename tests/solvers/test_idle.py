"""Ops that a replay leaves out: which they are, and what that saves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from solvers import idle_ops, simulate
from solvers.judge.replay import replay_of
from solvers.plan import Plan, Region
from solvers.problem import Gradient
from solvers.search.flat import search_of
from solvers.search.nested import _cuts
from solvers.search.stages import stage_edges
from tests.solvers.checker import check
from tests.solvers.models import attention_blocks
from tests.solvers.problems import Builder


def branches(**last):
    """A norm that three matmuls read: 1, 2 and 3; the sum of what the first two make, and of all.

    Op 0 makes 8 bytes that the matmuls save.
    """
    b = Builder()
    x = b.value(b.storage(8), 8, leaf=True)
    weight = b.parameter(4)

    def op(name, inputs, saved=(), **fields):
        made = b.value(b.storage(8, producer=len(b.ops)), 8)
        gradients = tuple(Gradient(value=v, source=k) for k, v in enumerate(inputs))
        b.op(
            name,
            inputs=inputs,
            outputs=(made,),
            saved=tuple(b.values[v].storage for v in saved),
            packs=bool(saved),
            gradient_bytes=(8,) * len(inputs),
            gradients=gradients,
            **{"cost": 1, **fields},
        )
        return made

    norm = op("norm", (x,), (x,))
    parts = [op("matmul", (norm, weight), (norm,), cost=10) for _ in range(3)]
    both = op("add", tuple(parts[:2]))
    whole = op("mul", (both, parts[2]), (both, parts[2]), **last)
    return b.problem(whole)


@pytest.mark.parametrize(
    ("region", "idle", "cost"),
    [
        # The first two pack the norm and do not run; the last is where the replay ends.
        (Region(start=0, stop=4), {1, 2}, 1),
        # What the product saves is made of all three.
        (Region(start=0, stop=6), set(), 32),
        # Held, the sum and the third make their inputs needless.
        (Region(start=0, stop=6, kept=(3, 4)), {1, 2}, 1),
        # Only the second op's result is kept for nothing.
        (Region(start=0, stop=4, kept=(2,)), {1, 2}, 1),
        # A region inside that makes nothing of what is wanted is not called again.
        (Region(start=0, stop=4, children=(Region(start=1, stop=3),)), {1, 2}, 1),
    ],
)
def test_what_is_left_out(region, idle, cost):
    problem = branches()
    plan = Plan(regions=(region,))
    assert idle_ops(problem, plan)[region] == idle
    found = simulate(problem, plan)
    assert found.recompute_cost == cost
    peaks = (found.resident_peak_bytes, found.fresh_peak_bytes)
    assert (*peaks, found.recompute_cost, found.recomputed_ops) == check(problem, plan)


def test_what_is_kept_for_nothing_is_not_held():
    problem = branches()
    kept = Plan(regions=(Region(start=0, stop=4, kept=(2,)),))
    assert simulate(problem, kept).kept_bytes == simulate(problem, Plan.flat([(0, 4)])).kept_bytes


@pytest.mark.parametrize("changes", [{"random": True}, {"pinned": True}])
def test_ops_with_effects_run(changes):
    problem = branches()
    ops = list(problem.ops)
    ops[1] = replace(ops[1], **changes)
    region = Region(start=0, stop=4)
    found = replay_of(replace(problem, ops=tuple(ops))).frames.idling(region, 3)
    assert found.ops == {2, 3}


def test_the_table_says_what_the_regions_say():
    problem = branches()
    idling = replay_of(problem).frames.idling
    table = idling.table(0, len(problem.ops))
    for last, op in enumerate(problem.ops):
        if op.packs:
            idle = idling(Region(start=0, stop=last + 1), last).ops
            assert idle == {k for k in range(last + 1) if not table[k, last]}


def test_where_modules_are_the_regions_all_of_their_python_runs():
    problem = replace(branches(), spans=())
    assert not replay_of(problem).frames.idling(Region(start=0, stop=4), 3).ops


def test_whole_layers_may_be_parents():
    replay = replay_of(attention_blocks(12))
    edges = stage_edges(replay)
    assert len(edges) > 4
    assert set(edges) <= set(_cuts(search_of(replay)))
