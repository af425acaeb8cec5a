"""Time limits: solvers of programs keep to them, and have a plan all the same."""

from __future__ import annotations

import time

import pytest

from solvers import Plan, best_schedule, bound, simulate, solve
from solvers.chains import equal_chain
from solvers.judge.replay import replay_of
from solvers.programs import run_program
from solvers.search import remat
from solvers.search.local import WITHOUT_END, Deadline
from solvers.search.remat import OutOfTimeError, RematProgram, make_step
from tests.solvers.models import gpt2


@pytest.fixture(scope="module")
def layer():
    """One layer of a transformer, whose program is not solved within the limits below."""
    problem = gpt2(layers=1)
    return problem, problem.fixed_bytes + int(0.8 * simulate(problem, Plan()).activation_peak_bytes)


@pytest.mark.parametrize("solver", ["checkmate", "ilp", "auto"])
@pytest.mark.parametrize("seconds", [1e-9, 1.0])
def test_a_limit_is_kept_and_leaves_a_plan(layer, solver, seconds):
    problem, budget = layer
    started = time.process_time()
    plan = solve(problem, budget, solver, seconds=seconds)
    # Far from what the program takes without a limit; other work on the machine does not count.
    assert time.process_time() - started < seconds + 5
    assert simulate(problem, plan).peak_bytes <= budget
    assert plan.status == "time limit" or seconds == 1.0


def test_checkmate_says_that_it_was_cut_short(layer):
    problem, budget = layer
    assert solve(problem, budget, "checkmate", seconds=1.0).status == "time limit"
    found = best_schedule(problem, budget, seconds=1.0)
    assert found.status == "time limit"
    assert found.bound >= bound(problem, budget) > 0
    assert found.cost is None or found.cost >= found.bound


def test_making_the_program_counts(layer, monkeypatch):
    problem, budget = layer
    step = make_step(replay_of(problem))
    with pytest.raises(OutOfTimeError):
        RematProgram(step, budget, relaxed=False, deadline=Deadline.after(0.0))
    RematProgram(step, budget, relaxed=False, deadline=WITHOUT_END)

    def refuse(*args, **options):
        raise AssertionError("solved after the time was over")

    monkeypatch.setattr(remat.RematProgram, "_add_totals", lambda *args: time.sleep(0.05))
    monkeypatch.setattr("solvers.checkmate.run_program", refuse)
    assert best_schedule(problem, budget, seconds=0.5).status == "time limit"


def test_what_the_backend_proved_is_a_bound():
    problem = equal_chain(ops=7, input_bytes=8, hidden_bytes=24)
    budget = simulate(problem, Plan()).peak_bytes - 30
    whole = best_schedule(problem, budget)
    program = RematProgram(make_step(replay_of(problem)), budget, relaxed=False)
    run_program(program.model, exact=True)
    proven = program.proven_bound()
    assert proven is None or 0 < proven <= whole.cost
