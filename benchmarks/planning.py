"""What planning itself takes: seconds of each stage, and memory beside that of the largest op.

python -m benchmarks.planning [MODEL ...]

With cost="roofline" and a budget of 30 %. Memory is the highest level of each stage above the
level at its start; the largest op is the most that one op and its backward have alive.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import autockpt
from autockpt import choosing, meters, pipeline
from benchmarks.common import MB, show
from solvers import Plan, Problem, simulate
from tests import zoo
from tests.helpers import peak_above_start

STAGES = ("record", "check", "profile", "solve")


def main() -> None:
    """Print a table of seconds and one of bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["gpt2_design", *zoo.ZOO])
    models = parser.parse_args().models
    rows = [{"model": name, **seconds(getattr(zoo, name))} for name in models]
    show('Planning, seconds, cost="roofline", budget 30 %', rows, "planning_seconds")
    rows = [{"model": name, **memory(getattr(zoo, name))} for name in models]
    show("Planning, MB above the start of each stage", rows, "planning_memory")


def seconds(make: Callable[[], zoo.Case]) -> dict[str, Any]:
    """Give the seconds of each stage and of the whole call."""
    found = dict.fromkeys(STAGES, 0.0)

    def clocked(stage: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return run()
        finally:
            found[stage] += time.perf_counter() - start

    case = make()
    with staged(STAGES, clocked):
        start = time.perf_counter()
        model = optimized(case)
        total = time.perf_counter() - start
    handle = model.autockpt
    return {"ops": len(handle.problem.ops), **found, "all": total}


def memory(make: Callable[[], zoo.Case]) -> dict[str, Any]:
    """Give the peak of each stage beside the largest op and what the budget leaves."""
    found: dict[str, int] = {}

    def watched(stage: str, run: Callable[[], Any]) -> Any:
        results: list[Any] = []
        found[stage] = peak_above_start(lambda: results.append(run()))
        return results[0]

    close = meters.CpuMeter.__exit__

    def closed(meter: meters.CpuMeter, *error: object) -> None:
        close(meter, *error)
        # The profiler has one user at a time: here it is the meter of the ops itself.
        found["profile"] = max(itertools.accumulate(meter._deltas, initial=0))

    with mock.patch.object(meters.CpuMeter, "__exit__", closed), staged(STAGES[:2], watched):
        handle = optimized(make()).autockpt
    problem = handle.problem
    return {
        **{f"{stage} MB": found[stage] / MB for stage in STAGES[:3]},
        "largest op MB": largest_op_bytes(problem) / MB,
        "budget's room MB": (handle.report.budget_bytes - problem.fixed_bytes) / MB,
        "plain step MB": simulate(problem, Plan()).activation_peak_bytes / MB,
    }


def optimized(case: zoo.Case) -> Any:
    """Plan a case at 30 %."""
    return autockpt.optimize(
        case.model,
        case.args,
        case.kwargs,
        memory_budget="30%",
        loss=case.loss,
        cost="roofline",
    )


def largest_op_bytes(problem: Problem) -> int:
    """Give the most that one op holds, forward or backward, gradients of its results included."""
    storages, values = problem.storages, problem.values
    largest = 0
    for index, op in enumerate(problem.ops):
        reads = {values[value].storage for value in op.inputs}
        read = sum(storages[s].nbytes for s in reads if storages[s].producer is not None)
        made = sum(storage.nbytes for storage in storages if storage.producer == index)
        forward = op.forward_workspace_bytes
        backward = op.backward_workspace_bytes + sum(op.gradient_bytes)
        backward += sum(values[value].gradient_bytes for value in op.outputs)
        largest = max(largest, read + made + max(forward, backward))
    return largest


@contextmanager
def staged(
    stages: tuple[str, ...], around: Callable[[str, Callable[[], Any]], Any]
) -> Iterator[None]:
    """Run the named stages of the pipeline inside ``around``."""

    def room(stage: str) -> Any:
        return choosing if stage == "solve" else pipeline

    def wrapped(stage: str) -> Callable[..., Any]:
        run: Callable[..., Any] = getattr(room(stage), stage)
        return lambda *args, **kwargs: around(stage, lambda: run(*args, **kwargs))

    with ExitStack() as stack:
        for stage in stages:
            stack.enter_context(mock.patch.object(room(stage), stage, wrapped(stage)))
        yield


if __name__ == "__main__":
    main()
