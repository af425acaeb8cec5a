"""Regions that are calls of modules: against every set of them, and what is no such region."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from solvers import InfeasibleError, Plan, PlanError, simulate, solve
from solvers.judge.replay import replay_of
from solvers.judge.wellformed import check_plan
from solvers.minimum import least_peak
from solvers.plan import Region
from solvers.problem import Span
from tests.solvers.models import gpt2


def with_spans(problem):
    """Every module whose ops are one run may be a region."""
    ops = {}
    for index, op in enumerate(problem.ops):
        parts = op.module.split(".") if op.module else []
        for depth in range(1, len(parts) + 1):
            ops.setdefault(".".join(parts[:depth]), []).append(index)
    spans = {}
    for name, found in ops.items():
        start, stop = found[0], found[-1] + 1
        if found == list(range(start, stop)):
            spans.setdefault((start, stop), Span(name=name, start=start, stop=stop))
    ordered = sorted(spans.values(), key=lambda span: (span.start, -span.stop))
    return replace(problem, spans=tuple(ordered))


def nested(spans):
    """The regions of a set of spans, outer ones first."""
    regions = []
    rest = list(spans)
    while rest:
        span, *others = rest
        inside = [other for other in others if other.stop <= span.stop]
        rest = others[len(inside) :]
        regions.append(
            Region(start=span.start, stop=span.stop, children=nested(inside), module=span.name)
        )
    return tuple(regions)


@pytest.fixture(scope="module")
def every_set():
    """A GPT-2 of two layers, and peak and cost of every set of its modules."""
    problem = with_spans(gpt2(layers=2, batch=2, length=64, width=64, vocabulary=100))
    replay = replay_of(problem)
    spans = problem.spans
    prices = [
        replay.price(nested(chosen))
        for size in range(len(spans) + 1)
        for chosen in combinations(spans, size)
    ]
    return problem, prices


@pytest.mark.parametrize("share", [0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95])
def test_as_cheap_as_the_best_set(every_set, share):
    problem, prices = every_set
    least, plain = min(prices)[0], prices[0][0]
    budget = least + int(share * (plain - least))
    plan = solve(problem, budget)
    best = min(cost for peak, cost in prices if peak <= budget)
    assert plan.peak_bytes == simulate(problem, plan).peak_bytes <= budget
    assert plan.recompute_cost == best


def test_the_least_peak_of_all_sets(every_set):
    problem, prices = every_set
    least = min(prices)[0]
    assert least_peak(problem).peak_bytes == least
    assert solve(problem, least).peak_bytes == least
    with pytest.raises(InfeasibleError) as caught:
        solve(problem, least - 1)
    assert caught.value.minimum_bytes == least


def test_many_equal_layers_are_planned_quickly():
    problem = with_spans(gpt2(layers=24))
    plain = simulate(problem, Plan())
    budget = problem.fixed_bytes + plain.activation_peak_bytes // 3
    plan = solve(problem, budget)
    assert plan.peak_bytes <= budget
    assert plan.solve_seconds < 20
    by_hand = [span for span in problem.spans if span.name.count(".") == 2]
    assert plan.recompute_cost < replay_of(problem).price(nested(by_hand))[1]
    assert solve(problem, budget).regions == plan.regions


def test_json_keeps_the_names():
    problem = with_spans(gpt2(layers=2))
    plan = solve(
        problem, problem.fixed_bytes + simulate(problem, Plan()).activation_peak_bytes // 2
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert all(region.module for region in plan.walk())


@pytest.mark.parametrize(
    "region", [Region(start=0, stop=2), Region(start=4, stop=23, module="transformer.h.7")]
)
def test_other_regions_are_refused(region):
    problem = with_spans(gpt2(layers=2))
    with pytest.raises(PlanError, match="no call of a module"):
        check_plan(Plan(regions=(region,)), problem)


def test_solvers_of_runs_are_refused():
    problem = with_spans(gpt2(layers=2))
    with pytest.raises(PlanError, match="solver='rotor'"):
        solve(problem, problem.fixed_bytes, "rotor")
