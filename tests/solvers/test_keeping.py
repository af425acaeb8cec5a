"""Plans whose regions keep ops: what is well-formed, and that auto finds them where they pay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from solvers import PlanError, simulate, solve
from solvers.judge.keeping import held_for
from solvers.judge.replay import replay_of
from solvers.plan import Plan, Region
from solvers.search.flat import search_of
from solvers.search.interval_search import needs_of
from solvers.search.keeping_search import with_kept, worth_keeping
from tests.solvers.checker import check
from tests.solvers.models import attention_blocks


@pytest.fixture(scope="module")
def problem():
    """Cheap queries, a dear op that saves them and its own result."""
    return attention_blocks(6)


def keeping(**changes):
    return Plan(regions=(replace(Region(start=1, stop=4, kept=(2,)), **changes),))


def test_what_is_kept_is_held_and_not_run_again(problem):
    found = simulate(problem, keeping())
    again = simulate(problem, Plan.flat([(1, 4)]))
    nbytes = sum(problem.storages[s].nbytes for s in held_for(problem, 2))
    assert found.kept_bytes == again.kept_bytes + nbytes
    assert found.recompute_cost < again.recompute_cost
    peaks = (found.resident_peak_bytes, found.fresh_peak_bytes)
    assert (*peaks, found.recompute_cost, found.recomputed_ops) == check(problem, keeping())


def test_auto_finds_them_where_they_pay(problem):
    room = simulate(problem, Plan()).peak_bytes - problem.fixed_bytes
    gains = 0
    for share in (0.8, 0.7, 0.6, 0.5):
        budget = problem.fixed_bytes + int(share * room)
        plan, flat = solve(problem, budget, "auto"), solve(problem, budget, "interval_dp")
        assert simulate(problem, plan).peak_bytes <= budget
        assert plan.recompute_cost <= flat.recompute_cost
        gains += plan.recompute_cost < flat.recompute_cost and any(r.kept for r in plan.regions)
    assert gains


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_every_offer_is_a_plan_and_priced_as_the_judge_does(problem, rate):
    search = search_of(replay_of(problem))
    found = with_kept(search, worth_keeping(search.replay, rate))
    offered = [segment for segments in found.values() for segment in segments]
    assert offered
    for segment in offered:
        region = segment.region
        assert region.kept == search.replay.frames(region).kept != ()
        plan = Plan(regions=(region,))
        assert simulate(problem, plan).recompute_cost == segment.cost
        assert Plan.from_json(plan.to_json()) == plan
        held = sum(problem.storages[s].nbytes for i in region.kept for s in held_for(problem, i))
        assert segment.needs >= needs_of(search, region)
        assert segment.needs <= needs_of(search, region) + held
        flat = search.tables.region_keeps[region.start, region.stop - region.start]
        assert flat <= segment.keeps <= flat + held


def test_what_is_not_worth_its_bytes_is_not_kept(problem):
    search = search_of(replay_of(problem))

    def kept(rate):
        found = with_kept(search, worth_keeping(search.replay, rate))
        return {i for segments in found.values() for s in segments for i in s.region.kept}

    dear, cheap = kept(1.0), kept(0.3)
    assert dear < cheap
    assert not kept(1000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kept": (0,)}, "not a list of its ops"),
        ({"kept": (3, 2)}, "not a list of its ops"),
        ({"children": (Region(start=1, stop=2),)}, "neither may keep|parent or children"),
    ],
)
def test_malformed_plans_are_refused(problem, changes, message):
    with pytest.raises(PlanError, match=message):
        simulate(problem, keeping(**changes))


def test_ops_that_cannot_be_kept_are_refused(problem):
    ops = list(problem.ops)
    ops[2] = replace(ops[2], copied=(0,))
    with pytest.raises(PlanError, match="kept apart"):
        simulate(replace(problem, ops=tuple(ops)), keeping())


def test_of_the_draws_of_a_region_all_are_kept_or_none(problem):
    """A draw that is left out would hand what was its to the next one."""
    ops = list(problem.ops)
    ops[2], ops[3] = replace(ops[2], random=True), replace(ops[3], random=True)
    drawing = replace(problem, ops=tuple(ops), random_state_bytes=5056)
    region = keeping().regions[0]
    with pytest.raises(PlanError, match="all of them, or none"):
        simulate(drawing, keeping(kept=(2,)))
    frame = replay_of(drawing).frames(replace(region, kept=(2, 3)))
    assert not frame.random
    assert replay_of(drawing).frames(replace(region, kept=())).random
