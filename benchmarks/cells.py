"""One cell of ``benchmarks.optimum``, measured in a process of its own.

    python -m benchmarks.cells '{"model": "gpt2", "kind": "planned", "budget": "50%"}'

prints one line of JSON. Peaks and FLOPs are exact; times are medians of interleaved pairs.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

import autockpt
from autockpt.pipeline import lower_step
from autockpt.profiler.aten_log import AtenLog
from autockpt.profiler.cost import CostChoice, OpWork
from autockpt.runtime.handle import Handle
from autockpt.step import Measurement
from benchmarks.common import flops, step, time_ratio, with_model
from benchmarks.models import LAYERS, MODELS, by_hand
from solvers import (
    InfeasibleError,
    Plan,
    PlanError,
    Problem,
    best_schedule,
    bound,
    simulate,
    solve,
)
from solvers.search.blocks import blocks, grouped
from tests.zoo import Case

Row = dict[str, Any]
_AMPLE = 1 << 50
_SCHEDULE_SECONDS = 60.0


def raw_flops(work: OpWork) -> int:
    """As a cost: PyTorch's own budget counts nothing else."""
    return work.flops


COSTS: dict[str, CostChoice] = {"time": "time", "roofline": "roofline", "flops": raw_flops}


def plain(model: str, **_: Any) -> Row:
    """The plain step, and what one forward of it costs."""
    case = MODELS[model]()
    seen = _measure(case)
    return {
        "MB": seen.activation_peak_bytes / 1e6,
        "fixed MB": seen.fixed_bytes / 1e6,
        "bytes": seen.activation_peak_bytes,
        "step flops": flops(case),
        "step ms": 1e3 * _least_seconds(case),
    }


def hand(model: str, variant: str, pairs: int, **_: Any) -> Row:
    """Placed by hand: every layer, the first layers, or segments of sqrt(n) layers."""
    case = MODELS[model]()
    problem = _problem(case)
    if variant == "sqrt":
        runs = blocks(problem)
        plan = Plan(regions=grouped(problem, runs, max(1, math.isqrt(len(runs)))))
        placed = with_model(case, _with_plan(case, plan))
    else:
        layers = 1.0 if variant == "layer" else float(variant)
        plan = _as_plan(case, model, layers, problem)
        placed = by_hand(model, layers)
    return {**_against(case, placed, pairs), "share": _share(problem, plan)}


def _as_plan(case: Case, model: str, share: float, problem: Problem) -> Plan:
    """The placement by hand as regions, to be priced like any plan."""
    layers = [name for name, m in case.model.named_modules() if type(m).__name__ in LAYERS[model]]
    intervals = []
    for name in layers[: round(share * len(layers))]:
        # Counters of batches stand at the end of the step, apart from their layers.
        inside = [
            i
            for i, op in enumerate(problem.ops)
            if f"{op.module}.".startswith(f"{name}.") and not op.pinned
        ]
        intervals.append((inside[0], inside[-1] + 1))
    return Plan.flat(sorted(intervals))


def planned(
    model: str,
    pairs: int,
    budget: str | int = "50%",
    solver: str = "auto",
    cost: str = "roofline",
    **_: Any,
) -> Row:
    """Planned for a budget; an int is bytes of activations, "least" the least there is."""
    case = MODELS[model]()
    fixed = _measure(case).fixed_bytes
    asked: str | int = budget
    if budget == "least":
        least = autockpt.minimum_budget(
            case.model, case.args, case.kwargs, loss=case.loss, cost=COSTS[cost]
        )
        asked = int(least)
    elif isinstance(budget, int):
        # The measured peak of another placement is to be met: what the margin takes is given.
        asked = fixed + budget + -(-budget // 199)
    start = time.perf_counter()
    try:
        made = autockpt.optimize(
            case.model,
            case.args,
            case.kwargs,
            loss=case.loss,
            memory_budget=asked,
            solver=solver,
            cost=COSTS[cost],
        )
    except InfeasibleError as error:
        return {"infeasible": (error.minimum_bytes or 0) - fixed}
    seconds = time.perf_counter() - start
    report = cast(Handle, made.autockpt).report
    return {
        **_against(case, with_model(case, made), pairs),
        "share": report.recompute_share,
        "bound": report.bound_share,
        "regions": len(report.regions),
        "solve seconds": report.solve_seconds,
        "plan seconds": seconds,
    }


def compiled(model: str, share: float, pairs: int, **_: Any) -> Row:
    """PyTorch's own budget, under the backend that partitions and runs eagerly."""
    import torch._functorch.config as functorch

    case = MODELS[model]()
    functorch.activation_memory_budget = share
    made = torch.compile(case.model, backend="aot_eager_decomp_partition")
    placed = with_model(case, cast(torch.nn.Module, made))
    for _warm in range(2):
        step(placed)
    seen = _measure(placed)
    row = _ratios(case, seen.activation_peak_bytes)
    row["time"] = time_ratio(case, placed, pairs) if pairs else None
    plain_flops = flops(case)
    row["FLOPs"] = _compiled_flops(MODELS[model]()) / plain_flops
    return row


def duel(model: str, share: float, budget: int, pairs: int, **_: Any) -> Row:
    """A plan with measured times as its cost, against PyTorch's budget, in paired runs."""
    import torch._functorch.config as functorch

    case = MODELS[model]()
    fixed = _measure(case).fixed_bytes
    try:
        made = autockpt.optimize(
            case.model,
            case.args,
            case.kwargs,
            loss=case.loss,
            memory_budget=fixed + budget + -(-budget // 199),
        )
    except InfeasibleError as error:
        return {"infeasible": (error.minimum_bytes or 0) - fixed}
    other = MODELS[model]()
    functorch.activation_memory_budget = share
    theirs = torch.compile(other.model, backend="aot_eager_decomp_partition")
    placed = with_model(other, cast(torch.nn.Module, theirs))
    for _warm in range(2):
        step(placed)
    return {"time over torch": time_ratio(placed, with_model(case, made), max(3, pairs))}


def block(model: str, percent: int, **_: Any) -> Row:
    """The first layer of a model alone: bound, relaxed program, best schedule, best plan."""
    problem = _problem(_first_layer(model))
    peak = simulate(problem, Plan()).activation_peak_bytes
    budget = problem.fixed_bytes + peak * percent // 100
    row: Row = {"ops": len(problem.ops)}
    calls: dict[str, Callable[[], int | None]] = {
        "bound": lambda: bound(problem, budget),
        "relaxed": lambda: best_schedule(problem, budget, relaxed=True).bound,
        "schedule": lambda: best_schedule(problem, budget, seconds=_SCHEDULE_SECONDS).cost,
        "auto": lambda: solve(problem, budget).recompute_cost,
    }
    for name, call in calls.items():
        try:
            cost = call()
        except (InfeasibleError, PlanError):
            # None fits, or the program is too large.
            cost = None
        row[name] = None if cost is None else cost / problem.forward_cost
    return row


def _first_layer(model: str) -> Case:
    """The first layer that people checkpoint, on what the model hands it."""
    case = MODELS[model]()
    layer = next(m for m in case.model.modules() if type(m).__name__ in LAYERS[model])
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = layer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    case.model(*case.args, **case.kwargs)
    handle.remove()
    args, kwargs = pytree.tree_map_only(torch.Tensor, _apart, calls[0])
    return Case(layer, args, kwargs, _total)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor of one's own, that gradients flow to if they flowed to this one."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _total(output: Any) -> torch.Tensor:
    return next(x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)).sum()


KINDS: dict[str, Callable[..., Row]] = {
    "plain": plain,
    "hand": hand,
    "planned": planned,
    "compiled": compiled,
    "duel": duel,
    "block": block,
}


def _measure(case: Case) -> Measurement:
    return autockpt.measure(case.model, case.args, case.kwargs, loss=case.loss)


def _least_seconds(case: Case) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        step(case)
        times.append(time.perf_counter() - start)
    return min(times)


def _with_plan(case: Case, plan: Plan) -> torch.nn.Module:
    return autockpt.optimize(
        case.model,
        case.args,
        case.kwargs,
        loss=case.loss,
        memory_budget=_AMPLE,
        plan=plan,
        cost="roofline",
    )


def _problem(case: Case) -> Problem:
    return lower_step(case.model, case.args, case.kwargs, case.loss, "roofline")[1]


def _share(problem: Problem, plan: Plan) -> float | None:
    try:
        return simulate(problem, plan).recompute_share
    except PlanError:
        # What people wrap may hold what has to stay outside; FLOPs tell all the same.
        return None


def _ratios(case: Case, activation_bytes: int) -> Row:
    whole = _measure(case).activation_peak_bytes
    return {"bytes": activation_bytes, "peak": activation_bytes / whole}


def _against(case: Case, placed: Case, pairs: int) -> Row:
    """Peak, FLOPs and step time over the plain step's."""
    row = _ratios(case, _measure(placed).activation_peak_bytes)
    row["time"] = time_ratio(case, placed, pairs) if pairs else None
    row["FLOPs"] = flops(placed) / flops(case)
    return row


def _compiled_flops(case: Case) -> int:
    """FLOPs of a compiled step, summed over its graphs when they are compiled.

    A mode around the step itself would make Dynamo run it eagerly, and count the plain step.
    """
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    found = []

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        mode = next(x.fake_mode for x in inputs if isinstance(x, FakeTensor))
        with mode, AtenLog() as log:
            graph(*inputs)
        found.append(log.tally.flops)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=count,
        bw_compiler=count,
        decompositions=select_decomp_table,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    torch._dynamo.reset()
    made = torch.compile(case.model, backend=backend)
    step(with_model(case, cast(torch.nn.Module, made)))
    return int(sum(found))


def main() -> None:
    """Measure the cell that is described on the command line."""
    torch.set_num_threads(1)
    cell = json.loads(sys.argv[1])
    print(json.dumps(KINDS[cell["kind"]](**{k: v for k, v in cell.items() if k != "kind"})))


if __name__ == "__main__":
    main()
