"""Solvers against the oracle, the bounds and each other."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import (
    SOLVERS,
    InfeasibleError,
    NoPlanFoundError,
    Plan,
    PlanError,
    Region,
    bound,
    least_peak,
    peak_bound,
    simulate,
    solve,
)
from solvers.ilp import solve as solve_ilp
from solvers.judge.replay import replay_of
from solvers.problem import Gradient
from solvers.search import intervals
from solvers.search.blocks import blocks
from solvers.search.flat import best_flat, search_of
from solvers.search.intervals import make_intervals
from tests.solvers.checker import check
from tests.solvers.models import gpt2
from tests.solvers.problems import Builder, plans, problems

MB = 10**6

pytestmark = pytest.mark.filterwarnings("error::DeprecationWarning:pulp|solvers")


@pytest.fixture(scope="module")
def model():
    return gpt2(layers=4)


def budget_for(data, problem):
    """Draw a budget between what nothing can go below and what the plain step needs."""
    plain = simulate(problem, Plan()).peak_bytes
    return data.draw(st.integers(min(peak_bound(problem), plain), plain))


def outcome(problem, budget, solver):
    try:
        return solve(problem, budget, solver)
    except InfeasibleError as error:
        return error


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ilp_agrees_with_exhaustive(data):
    problem = data.draw(problems(max_ops=6))
    budget = budget_for(data, problem)
    oracle, found = outcome(problem, budget, "exhaustive"), outcome(problem, budget, "ilp")
    if isinstance(oracle, InfeasibleError):
        assert isinstance(found, InfeasibleError)
    else:
        assert (found.recompute_cost, found.status) == (oracle.recompute_cost, "optimal")


def test_a_region_that_never_runs_again_costs_nothing():
    b = Builder()
    x = b.value(b.storage(8), 8, leaf=True)
    # What the caller gets and the loss does not reach: its graph is there as long as that is.
    hidden = b.storage(40, producer=0)
    given = b.value(b.storage(8, producer=0), 8)
    saving = {"packs": True, "cost": 5, "stop_cost": 5}
    b.op("aside", inputs=(x,), outputs=(given,), saved=(hidden,), **saving)
    y = b.value(b.storage(8, producer=1), 8)
    own = {"gradient_bytes": (8,), "packs": True, "cost": 1, "stop_cost": 1}
    saved = (b.storage(40, producer=1),)
    handed = (Gradient(value=x, source=0),)
    b.op("cheap", inputs=(x,), outputs=(y,), saved=saved, gradients=handed, **own)
    loss = b.value(b.storage(4, producer=2), 4)
    own |= {"backward_workspace_bytes": 60, "gradients": (Gradient(value=y, source=0),)}
    b.op("loss", inputs=(y,), outputs=(loss,), **own)
    problem = b.problem(loss, (given,), region_cost=1)
    aside, cheap = (simulate(problem, Plan.flat([run])) for run in ((0, 1), (1, 2)))
    budget = max(aside.peak_bytes, cheap.peak_bytes)
    assert budget < simulate(problem, Plan()).peak_bytes
    assert (aside.recompute_cost, cheap.recompute_cost) == (0, 2)
    for name in ("exhaustive", "ilp"):
        found = solve(problem, budget, name)
        assert (found.recompute_cost, found.status) == (0, "optimal"), name


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_oracle_bounds_the_others(data):
    problem = data.draw(problems(max_ops=7))
    budget = budget_for(data, problem)
    oracle = outcome(problem, budget, "exhaustive")
    for name in sorted(set(SOLVERS) - {"exhaustive", "ilp"}):
        found = outcome(problem, budget, name)
        if isinstance(found, InfeasibleError):
            assert name != "auto" or isinstance(oracle, InfeasibleError)
            continue
        assert simulate(problem, found).peak_bytes == found.peak_bytes <= budget
        if not isinstance(oracle, Plan):
            # No plain regions fit: these are nested, or keep or make again something.
            assert any(r.children or r.kept or r.prologue for r in found.regions), name
        elif name != "auto":
            assert found.recompute_cost >= oracle.recompute_cost
        else:
            assert found.recompute_cost <= oracle.recompute_cost


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_plan_goes_below_the_bounds(data):
    problem = data.draw(problems())
    plan = data.draw(plans(problem))
    peak, fresh, cost, _ = check(problem, plan)
    assert max(peak, fresh) >= peak_bound(problem)
    assert cost >= bound(problem, max(peak, fresh))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_checker_refuses_a_corrupted_plan(data):
    """A plan that claims another peak or price than it has is found out."""
    problem = data.draw(problems())
    plan = data.draw(plans(problem))
    prediction = simulate(problem, plan)
    honest = replace(
        plan, peak_bytes=prediction.peak_bytes, recompute_cost=prediction.recompute_cost
    )
    assert audit(problem, honest) == []
    assert audit(problem, replace(honest, peak_bytes=honest.peak_bytes - 1))
    assert audit(problem, replace(honest, recompute_cost=honest.recompute_cost + 1))


def audit(problem, plan):
    """Return what is wrong with a plan's claims, by the toy runtime."""
    resident, fresh, cost, _ = check(problem, plan)
    wrong = []
    if max(resident, fresh) != plan.peak_bytes:
        wrong.append("peak")
    if cost != plan.recompute_cost:
        wrong.append("cost")
    return wrong


def test_dropping_a_region_of_a_tight_plan_is_found_out(model):
    budget = simulate(model, Plan()).peak_bytes // 2
    plan = solve(model, budget, "interval_dp")
    for k in range(len(plan.regions)):
        corrupt = replace(plan, regions=plan.regions[:k] + plan.regions[k + 1 :])
        assert audit(model, corrupt)


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ([Region(start=3, stop=3)], "not empty"),
        ([Region(start=5, stop=9), Region(start=7, stop=12)], "disjoint"),
        ([Region(start=-1, stop=4)], "does not lie in"),
        ([Region(start=5, stop=10**6)], "does not lie in"),
        ([Region(start=3, stop=9, children=(Region(start=3, stop=9),))], "own size"),
        ([Region(start=3, stop=9, children=(Region(start=8, stop=10),))], "does not lie in"),
    ],
)
def test_malformed_plans_are_refused(model, regions, message):
    with pytest.raises(PlanError, match=message):
        simulate(model, Plan(regions=tuple(regions)))


def test_edges_inside_inplace_stretches_and_pinned_ops_are_refused(model):
    boundaries = list(model.boundaries)
    boundaries[7] = False
    with pytest.raises(PlanError, match="in place"):
        simulate(replace(model, boundaries=tuple(boundaries)), Plan.flat([(7, 12)]))
    ops = list(model.ops)
    ops[8] = replace(ops[8], pinned=True)
    with pytest.raises(PlanError, match="must stay"):
        simulate(replace(model, ops=tuple(ops)), Plan.flat([(7, 12)]))


def test_another_models_plan_is_refused(model):
    with pytest.raises(PlanError, match="another model"):
        simulate(model, Plan(signature="else"))


@pytest.mark.parametrize("name", sorted(set(SOLVERS) - {"checkmate", "exhaustive", "none", "ilp"}))
def test_solvers_fit_and_are_deterministic(model, name):
    # What a cut leaves out comes back at once: that solver needs more room than the others.
    share = 0.8 if name == "min_cut" else 0.6
    budget = model.fixed_bytes + int(share * simulate(model, Plan()).activation_peak_bytes)
    plan, again = solve(model, budget, name), solve(replace(model), budget, name)
    assert plan.regions == again.regions
    assert plan.peak_bytes <= budget
    assert plan.budget_bytes == budget
    assert plan.solver == name
    assert plan.recompute_cost >= bound(model, budget)
    assert Plan.from_json(plan.to_json()) == plan


def test_auto_is_no_worse_than_any_other_and_monotone(model):
    activations = simulate(model, Plan()).activation_peak_bytes
    costs = []
    for share in (0.25, 0.4, 0.6, 0.8, 1.0):
        budget = model.fixed_bytes + int(share * activations)
        costs.append(solve(model, budget).recompute_cost)
        for name in ("every_k", "sqrt_n", "interval_dp"):
            found = outcome(model, budget, name)
            assert isinstance(found, InfeasibleError) or costs[-1] <= found.recompute_cost
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0


def test_plain_step_that_fits_is_proven_optimal(model):
    plan = solve(model, simulate(model, Plan()).peak_bytes)
    assert (plan.regions, plan.status, plan.recompute_cost) == ((), "optimal", 0)


def test_nested_regions_go_below_flat_ones(model):
    least = least_peak(model)
    with pytest.raises(InfeasibleError) as caught:
        solve(model, least.peak_bytes, "interval_dp")
    assert least.peak_bytes < caught.value.minimum_bytes
    assert any(region.children for region in least.regions)
    assert audit(model, least) == []
    assert solve(model, least.peak_bytes).peak_bytes <= least.peak_bytes


def test_ilp_says_when_it_ran_out_of_time(model):
    budget = model.fixed_bytes + simulate(model, Plan()).activation_peak_bytes // 2
    plan = solve_ilp(model, budget, seconds=0.0)
    assert (plan.status, plan.peak_bytes <= budget) == ("time limit", True)


def test_below_the_bound_no_plan_fits(model):
    least = least_peak(model).peak_bytes
    with pytest.raises(InfeasibleError, match=r"No plan fits .* Raise memory_budget") as caught:
        solve(model, peak_bound(model) - 1)
    assert not isinstance(caught.value, NoPlanFoundError)
    assert (caught.value.minimum_bytes, caught.value.bound_bytes) == (least, peak_bound(model))
    assert "transformer.h." in caught.value.op
    with pytest.raises(NoPlanFoundError, match="None found that fits"):
        solve(model, peak_bound(model))
    with pytest.raises(InfeasibleError):
        bound(model, peak_bound(model) - 1)


def test_a_users_solver(model):
    def mine(problem, budget_bytes):
        return Plan.flat(blocks(problem))

    budget = model.fixed_bytes + simulate(model, Plan()).activation_peak_bytes
    plan = solve(model, budget, mine)
    assert (plan.solver, plan.peak_bytes) == ("mine", simulate(model, plan).peak_bytes)
    with pytest.raises(PlanError, match=r"'mine' returned a plan whose peak is .* over"):
        solve(model, peak_bound(model), mine)
    with pytest.raises(PlanError, match="returned list, not a"):
        solve(model, budget, lambda problem, budget_bytes: [])
    with pytest.raises(PlanError, match="malformed"):
        solve(model, budget, lambda problem, budget_bytes: Plan.flat([(4, 2)]))
    with pytest.raises(PlanError, match=r"malformed: 1 is not a solvers\.Region"):
        solve(model, budget, lambda problem, budget_bytes: Plan(regions=(1, 2)))
    with pytest.raises(PlanError, match=r"start='a'.* does not begin and end at whole numbers"):
        solve(model, budget, lambda problem, budget_bytes: Plan.flat([("a", 2)]))
    with pytest.raises(PlanError, match="no solver 3"):
        solve(model, budget, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("null", "'null' is no object with 'regions'"),
        ("{}", "'{}' is no object with 'regions'"),
        ("3", "'3' is no object with 'regions'"),
        ('{"regions": [{"start": 1}]}', "a region has no 'stop'"),
        ('{"regions": [1]}', "'int'"),
        ('{"regions": [], "magic": 1}', "magic"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_plan_is_not_read(text, message):
    with pytest.raises(PlanError, match=r"not a plan written by Plan\.to_json: .*" + message):
        Plan.from_json(text)


def test_exhaustive_says_what_it_is_for(model):
    with pytest.raises(PlanError, match="at most 10 ops"):
        solve(model, model.fixed_bytes, "exhaustive")


def test_blocks_are_the_layers(model):
    found = blocks(model)
    assert len(found) == 4
    for layer, (start, stop) in enumerate(found):
        modules = {op.module for op in model.ops[start:stop]}
        assert all(module.startswith(f"transformer.h.{layer}") for module in modules)


def test_blocks_without_modules_are_chunks(model):
    bare = replace(model, ops=tuple(replace(op, module="") for op in model.ops))
    found = blocks(bare)
    assert found[0][0] == 0
    assert found[-1][1] == len(bare.ops)
    assert len(found) > 8


def test_progress_is_told(model):
    lines = []
    budget = model.fixed_bytes + simulate(model, Plan()).activation_peak_bytes // 2
    solve(model, budget, progress=lines.append)
    assert "local search" in lines


def test_solvers_need_no_torch():
    code = "import sys, solvers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_gpt2_in_the_size_of_the_design():
    """Recompute shares that flat regions reach at these activation peaks, in MB."""
    problem = gpt2()
    for megabytes, share in ((200, 0.17), (66, 0.66), (45, 1.0)):
        plan = solve(problem, problem.fixed_bytes + megabytes * MB)
        prediction = simulate(problem, plan)
        assert prediction.activation_peak_bytes <= megabytes * MB
        assert prediction.recompute_share <= share


def test_auto_says_when_it_ran_out_of_time(model):
    budget = model.fixed_bytes + simulate(model, Plan()).activation_peak_bytes // 2
    plan = solve(model, budget, seconds=1e-9)
    assert (plan.status, plan.peak_bytes <= budget) == ("time limit", True)
    assert plan.recompute_cost >= solve(model, budget, seconds=600).recompute_cost
    assert solve(model, budget, seconds=600).status == "feasible"
    assert solve(model, budget, "ilp", seconds=1e-9).status == "time limit"


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_no_region_of_auto_is_idle(model, share):
    budget = model.fixed_bytes + int(share * simulate(model, Plan()).activation_peak_bytes)
    regions = solve(model, budget).regions
    assert regions
    for k, region in enumerate(regions):
        fewer = Plan(regions=(*regions[:k], *region.children, *regions[k + 1 :]))
        assert simulate(model, fewer).peak_bytes > budget


def _in_stages(problem, layers):
    """The same layers as members of a few long stages, as those of a UNet are."""

    def renamed(op):
        parts = op.module.split(".")
        if parts[:2] != ["transformer", "h"]:
            return op
        stage, layer = divmod(int(parts[2]), layers)
        return replace(op, module=".".join(["stages", str(stage), "h", str(layer), *parts[3:]]))

    return replace(problem, ops=tuple(map(renamed, problem.ops)))


@pytest.mark.parametrize(("layers", "stages"), [(20, 1), (40, 2)])
def test_long_models_are_searched_over_the_edges_of_their_blocks(layers, stages):
    problem = gpt2(layers=layers)
    if stages > 1:
        problem = _in_stages(problem, layers // stages)
        # One alone is longer than two of the longest runs that are tabulated.
        outer = [i for i, op in enumerate(problem.ops) if op.module.startswith("stages.0.")]
        assert outer[-1] - outer[0] > 2 * intervals._REACH
    replay = replay_of(problem)
    positions = search_of(replay).positions
    assert len(problem.ops) > max(800, 1.6 * len(positions))
    budget = problem.fixed_bytes + simulate(problem, Plan()).activation_peak_bytes // 2
    found = simulate(problem, Plan(regions=best_flat(replay, budget)))
    everywhere = search_of(replay, len(problem.ops))
    assert len(everywhere.positions) == len(problem.ops) + 1
    best = simulate(problem, Plan(regions=everywhere.run(budget)))
    assert found.peak_bytes <= budget
    assert found.recompute_cost <= 1.03 * best.recompute_cost


def test_windows_say_what_the_whole_table_says(monkeypatch):
    replay = replay_of(gpt2(layers=2))
    whole = make_intervals(replay)
    monkeypatch.setattr(intervals, "_WHOLE_OPS", 10)
    monkeypatch.setattr(intervals, "_REACH", 37)
    banded = make_intervals(replay)
    size = replay.graph.size
    for name in ("region_keeps", "plain_keeps", "freed", "region_needs", "region_cost", "allowed"):
        for start in range(size):
            columns = slice(1, min(37, size - start) + 1)
            assert (
                getattr(whole, name)[start, columns] == getattr(banded, name)[start, columns]
            ).all()


def test_a_larger_budget_never_costs_more():
    problem = gpt2(layers=2)
    activations = simulate(problem, Plan()).activation_peak_bytes
    least = least_peak(problem).peak_bytes
    costs = [
        solve(problem, problem.fixed_bytes + activations * percent // 100).recompute_cost
        for percent in range(20, 101, 4)
        if problem.fixed_bytes + activations * percent // 100 >= least
    ]
    assert len(costs) > 12
    assert costs == sorted(costs, reverse=True)
