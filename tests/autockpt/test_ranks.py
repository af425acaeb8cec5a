"""Ranks that plan the same step: one solves, whatever becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from autockpt.runtime import ranks
from solvers import InfeasibleError, Plan

PLAN = Plan.flat([(0, 3), (4, 9)], solver="every_k")


@pytest.fixture
def _shared(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(ranks, "_store", lambda: store)


def together(work: Callable[[], Any], count: int = 4) -> list[Any]:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(work())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_alone_there_is_nobody_to_ask() -> None:
    assert ranks.agree("a step", lambda shared: PLAN if shared is None else Plan()) == PLAN


@pytest.mark.usefixtures("_shared")
def test_one_rank_solves_and_all_have_its_plan() -> None:
    solved: list[int] = []

    def solve(shared: Plan | None) -> Plan:
        if shared is None:
            solved.append(1)
            return PLAN
        return shared

    assert together(lambda: ranks.agree("a step", solve)) == [PLAN] * 4
    assert len(solved) == 1
    # Another question, another answer.
    ranks.agree("another step", solve)
    assert len(solved) == 2


@pytest.mark.usefixtures("_shared")
def test_where_the_first_finds_nothing_each_says_so() -> None:
    def solve(shared: Plan | None) -> Plan:
        assert shared is None
        raise InfeasibleError("too little", budget_bytes=1)

    def work() -> str:
        with pytest.raises(InfeasibleError, match="too little"):
            ranks.agree("a step", solve)
        return "told"

    assert together(work) == ["told"] * 4


@pytest.mark.usefixtures("_shared")
def test_a_rank_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_PATIENCE", timedelta(seconds=0.2))
    begun, gone = threading.Event(), threading.Event()

    def hanging(shared: Plan | None) -> Plan:
        begun.set()
        gone.wait()
        return PLAN

    first = threading.Thread(target=lambda: ranks.agree("a step", hanging))
    first.start()
    begun.wait()
    try:
        with pytest.warns(UserWarning, match="plans by itself"):
            assert ranks.agree("a step", lambda shared: Plan()) == Plan()
    finally:
        gone.set()
        first.join()
