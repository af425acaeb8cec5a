"""Local search: plans get cheaper, fit, and stay well-formed, whatever the move."""

from __future__ import annotations

import pytest

from solvers.judge.replay import replay_of
from solvers.judge.wellformed import check_plan
from solvers.plan import Plan
from solvers.search.flat import best_flat
from solvers.search.local import WITHOUT_END, Deadline, exchanged, fitted, improve
from solvers.search.moves import changes
from solvers.simulate import simulate
from tests.solvers.models import attention_blocks, gelu_blocks, gpt2, u_shape

MAKERS = {
    "gpt2": lambda: gpt2(layers=4),
    "gelu": lambda: gelu_blocks(8),
    "attention": lambda: attention_blocks(8),
}


@pytest.fixture(scope="module", params=MAKERS)
def problem(request):
    return MAKERS[request.param]()


def budget_of(problem, share):
    plain = simulate(problem, Plan()).peak_bytes
    return problem.fixed_bytes + int(share * (plain - problem.fixed_bytes))


def regions_of(problem, share):
    regions = best_flat(replay_of(problem), budget_of(problem, share))
    assert regions is not None
    return regions


def test_every_change_is_a_plan_and_priced_as_it_says(problem):
    replay = replay_of(problem)
    regions = regions_of(problem, 0.6)
    cost = replay.price(regions)[1]
    seen = list(changes(replay, regions, keeping=True))
    assert seen
    for change in seen:
        plan = Plan(regions=change.made(regions))
        check_plan(plan, problem)
        assert simulate(problem, plan).recompute_cost == cost + change.dearer(replay, regions)


def test_changes_make_inputs_again_and_no_more():
    problem = gelu_blocks(blocks=3)
    replay = replay_of(problem)
    regions = regions_of(problem, 0.75)
    made = [c for c in changes(replay, regions, keeping=True) if any(r.prologue for r in c.others)]
    assert made
    for change in made:
        check_plan(Plan(regions=change.made(regions)), problem)
        with_prologue = change.made(regions)
        back = [c.made(with_prologue) for c in changes(replay, with_prologue, keeping=True)]
        assert regions in back


def test_regions_are_added_where_there_are_none():
    problem = u_shape(depth=4)
    replay, budget = replay_of(problem), budget_of(problem, 0.8)
    found = fitted(replay, (), budget, 2000)
    assert found
    check_plan(Plan(regions=found), problem)
    assert simulate(problem, Plan(regions=found)).peak_bytes <= budget
    fewer = fitted(replay, found[1:], budget, 2000)
    assert fewer
    assert simulate(problem, Plan(regions=fewer)).peak_bytes <= budget


@pytest.mark.parametrize("search", [improve, exchanged])
@pytest.mark.parametrize("share", [0.7, 0.5])
def test_never_dearer_never_over(problem, search, share):
    replay, budget = replay_of(problem), budget_of(problem, share)
    regions = regions_of(problem, share)
    found = search(replay, regions, budget, 2000)
    plan = Plan(regions=found)
    check_plan(plan, problem)
    assert simulate(problem, plan).peak_bytes <= budget
    assert simulate(problem, plan).recompute_cost <= replay.price(regions)[1]
    assert search(replay, regions, budget, 2000) == found
    assert search(replay, regions, budget, 0) == regions
    assert search(replay, regions, budget, 2000, Deadline.after(0)) == regions


def test_exchanges_find_what_single_changes_do_not():
    better = 0
    for make in MAKERS.values():
        problem = make()
        replay = replay_of(problem)
        for share in (0.7, 0.6, 0.5, 0.4):
            budget = budget_of(problem, share)
            start = best_flat(replay, budget)
            if start is None:
                continue
            alone = improve(replay, start, budget, 20_000, WITHOUT_END, keeping=True)
            together = exchanged(replay, alone, budget, 20_000)
            better += replay.price(together)[1] < replay.price(alone)[1]
    assert better
