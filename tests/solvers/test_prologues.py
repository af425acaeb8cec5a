"""Regions that make inputs again rather than hold them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from solvers import PlanError, simulate, solve
from solvers.judge.prologue import repeatable_ops
from solvers.judge.replay import replay_of
from solvers.plan import Plan, Region
from solvers.search.flat import search_of
from solvers.search.prologue_search import with_prologues
from tests.solvers.checker import check
from tests.solvers.models import gelu_blocks


@pytest.fixture(scope="module")
def problem():
    """``half = x / 2`` in ``half * (1 + tanh(g(x)))``: g is dear, half is cheap."""
    return gelu_blocks(6)


def with_prologue(problem, **changes):
    return Plan(regions=(replace(Region(start=5, stop=8, prologue=(1,)), **changes),))


def test_what_is_made_again_is_not_held(problem):
    held = simulate(problem, Plan.flat([(5, 8)]))
    again = simulate(problem, with_prologue(problem))
    half = problem.storages[problem.values[problem.ops[1].outputs[0]].storage].nbytes
    assert again.kept_bytes == held.kept_bytes - half
    assert again.recompute_cost == held.recompute_cost + problem.ops[1].cost
    found = (again.resident_peak_bytes, again.fresh_peak_bytes)
    assert (*found, again.recompute_cost, again.recomputed_ops) == check(
        problem, with_prologue(problem)
    )


def test_auto_finds_them_where_they_pay(problem):
    plain = simulate(problem, Plan())
    room = plain.peak_bytes - problem.fixed_bytes
    gains = 0
    for share in (0.8, 0.7, 0.6):
        budget = problem.fixed_bytes + int(share * room)
        plan = solve(problem, budget, "auto")
        flat = solve(problem, budget, "interval_dp")
        assert simulate(problem, plan).peak_bytes <= budget
        assert plan.recompute_cost <= flat.recompute_cost
        if any(region.prologue for region in plan.regions):
            gains += plan.recompute_cost < flat.recompute_cost
    assert gains


@pytest.mark.parametrize("joined", [True, False])
def test_every_offer_is_a_plan_and_priced_as_the_judge_does(problem, joined):
    search = search_of(replay_of(problem))
    found = with_prologues(search, joined=joined)
    offered = [segment for segments in found.values() for segment in segments]
    assert offered
    assert all((s.start < s.region.start) is joined for s in offered)
    for segment in offered:
        plan = Plan(regions=(segment.region,))
        assert segment.region.prologue
        assert simulate(problem, plan).recompute_cost == segment.cost


def test_json_keeps_prologues(problem):
    plan = with_prologue(problem)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prologue": (5,)}, "not before the region"),
        ({"prologue": (2, 1)}, "not a list of ops in program order"),
        ({"prologue": (-1,)}, "not a list of ops in program order"),
        ({"children": (Region(start=6, stop=7),)}, "neither parent nor children"),
    ],
)
def test_malformed_prologues_are_refused(problem, changes, message):
    with pytest.raises(PlanError, match=message):
        simulate(problem, with_prologue(problem, **changes))


def test_ops_that_cannot_run_twice_are_refused(problem):
    assert 1 in repeatable_ops(problem)
    for change in ({"random": True}, {"pinned": True}, {"copied": (0,)}):
        ops = list(problem.ops)
        ops[1] = replace(ops[1], **change)
        with pytest.raises(PlanError, match="run again apart"):
            simulate(replace(problem, ops=tuple(ops)), with_prologue(problem))


def test_what_another_region_keeps_to_itself_is_refused(problem):
    # Op 4 reads what op 3 made, and nobody else does.
    regions = (Region(start=3, stop=5), Region(start=6, stop=8, prologue=(4,)))
    with pytest.raises(PlanError, match="makes and nobody else reads"):
        simulate(problem, Plan(regions=regions))
