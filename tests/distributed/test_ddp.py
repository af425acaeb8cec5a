"""DistributedDataParallel on two real processes: same bits, one plan, inside the budget."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import autockpt
from autockpt.errors import CaptureError
from tests import zoo
from tests.autockpt.test_runtime import Net, batch
from tests.distributed.launch import launch
from tests.helpers import equal, peak_above_start

SETTINGS: dict[str, Any] = {"cost": "roofline", "solver": "interval_dp"}
MODELS = {"gpt2": zoo.gpt2, "vit": zoo.vit}


def share(case: zoo.Case, rank: int, step: int) -> dict[str, Any]:
    """A batch of this rank's own: the case's, its samples in another order and half of them."""
    rng = torch.Generator().manual_seed(10 * step + rank)
    return {name: t[torch.randperm(len(t), generator=rng)] for name, t in case.kwargs.items()}


def train(model: nn.Module, case: zoo.Case, rank: int, steps: int = 3) -> list[float]:
    """Steps as a loop writes them; gives each loss."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in range(steps):
        torch.manual_seed(100 + 10 * rank + step)
        optimizer.zero_grad(set_to_none=bool(step % 2))
        loss = model(**share(case, rank, step)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def peak_beside(model: DistributedDataParallel, case: zoo.Case, rank: int) -> int:
    """Peak of a step as the allocator saw it, with what was there when it started."""
    kwargs = share(case, rank, 0)
    there = [*model.parameters(), *model.buffers(), *kwargs.values()]
    there += [p.grad for p in model.parameters() if p.grad is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in there}
    resident = sum(storages.values())
    if not model.gradient_as_bucket_view:
        resident += sum(p.nbytes for p in model.parameters())
    return resident + peak_above_start(lambda: model(**kwargs).loss.backward())


def three_steps(rank: int, name: str, wrap: dict[str, Any]) -> dict[str, Any]:
    case = MODELS[name]()
    torch.manual_seed(0)
    ours: Any = autockpt.optimize(copy.deepcopy(case.model), memory_budget="45%", **SETTINGS)
    plain = DistributedDataParallel(copy.deepcopy(case.model), **wrap)
    wrapped = DistributedDataParallel(ours, **wrap)
    losses = [train(model, case, rank) for model in (plain, wrapped)]
    same = all(map(equal, plain.state_dict().values(), wrapped.state_dict().values()))
    peaks = [peak_beside(model, case, rank) for model in (plain, wrapped)]
    report = ours.autockpt.report
    return {
        "losses": losses,
        "same": same,
        "peaks": peaks,
        "budget": report.budget_bytes,
        "plan": ours.autockpt.plan.regions,
        "steps": len(ours.autockpt._entries),
        "notes": report.notes,
        "digest": [float(p.detach().double().sum()) for p in wrapped.parameters()],
    }


WRAPS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {}),
    ("vit", {"gradient_as_bucket_view": True}),
    ("vit", {"find_unused_parameters": True}),
    ("gpt2", {"static_graph": True}),
]


def all_three_steps(rank: int) -> list[dict[str, Any]]:
    return [three_steps(rank, name, wrap) for name, wrap in WRAPS]


def test_three_steps() -> None:
    for (name, wrap), *ranks in zip(WRAPS, *launch(all_three_steps), strict=True):
        for found in ranks:
            assert found["same"], (name, wrap)
            assert found["losses"][0] == found["losses"][1]
            assert found["plan"]
            assert found["steps"] == 1
            assert found["peaks"][1] <= found["budget"] < found["peaks"][0], (name, wrap)
            told = any("buckets" in note for note in found["notes"])
            assert told != wrap.get("gradient_as_bucket_view", False)
        first, second = ranks
        assert first["losses"] != second["losses"]
        assert first["digest"] == second["digest"]
        assert first["plan"] == second["plan"]


def accumulate(model: DistributedDataParallel, case: zoo.Case, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(2):
        for part in range(3):
            torch.manual_seed(100 * rank + 10 * step + part)
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                (model(**share(case, rank, part)).loss / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def uneven(model: DistributedDataParallel, case: zoo.Case, rank: int) -> None:
    """One rank has a batch more, and the last of the other is smaller."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with Join([model]):
        for step in range(2 + rank):
            torch.manual_seed(10 * rank + step)
            rows = 3 if (rank, step) == (0, 1) else 4
            kwargs = {name: t[:rows] for name, t in share(case, rank, step).items()}
            model(**kwargs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def checkpoint_saved(model: DistributedDataParallel, case: zoo.Case, rank: int) -> None:
    """Frozen and thawed, evaluated and loaded, as between epochs."""
    train(model, case, rank, 1)
    model.eval()
    with torch.no_grad():
        model(**case.kwargs)
    model.train()
    state = copy.deepcopy(model.state_dict())
    train(model, case, rank, 1)
    model.load_state_dict(state)
    train(model, case, rank, 1)


LOOPS = {f.__name__: f for f in (accumulate, uneven, checkpoint_saved)}


def looped(rank: int, name: str) -> dict[str, Any]:
    case = zoo.gpt2(layers=2)
    # The plan is made before the wrapping, and again where the buckets are known.
    ours: Any = autockpt.optimize(
        copy.deepcopy(case.model), kwargs=case.kwargs, memory_budget="60%", **SETTINGS
    )
    first = ours.autockpt.report.budget_bytes
    plain = DistributedDataParallel(copy.deepcopy(case.model))
    wrapped = DistributedDataParallel(ours)
    for model in (plain, wrapped):
        LOOPS[name](model, case, rank)
    return {
        "same": all(map(equal, plain.state_dict().values(), wrapped.state_dict().values())),
        "plan": ours.autockpt.plan.regions,
        "more": ours.autockpt.report.budget_bytes - first,
        "gradients": sum(p.nbytes for p in ours.parameters()),
        "digest": [float(p.detach().double().sum()) for p in wrapped.parameters()],
    }


def all_looped(rank: int) -> list[dict[str, Any]]:
    return [looped(rank, name) for name in LOOPS]


def test_loops() -> None:
    for name, first, second in zip(LOOPS, *launch(all_looped), strict=True):
        for found in (first, second):
            assert found["same"], name
            assert found["plan"]
            assert found["more"] == found["gradients"]
        assert first["digest"] == second["digest"], name


def measured_costs(rank: int) -> dict[str, Any]:
    """Times differ from rank to rank, the plan does not; a rank may plan what no other does."""
    model: Any = autockpt.optimize(
        nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]),
        (torch.ones(2048, 64),),
        memory_budget="60%",
    )
    if rank == 1:
        alone: Any = autockpt.optimize(Net(), (batch(),), memory_budget="60%")
        assert alone.autockpt.plan.regions
    costs = [op.cost for op in model.autockpt.problem.ops]
    return {"plan": model.autockpt.plan.regions, "costs": costs}


def infeasible(rank: int) -> str:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    wrapped = DistributedDataParallel(autockpt.optimize(model, memory_budget=200_000, **SETTINGS))
    try:
        wrapped(torch.ones(64, 64)).sum().backward()
    except autockpt.BudgetError as error:
        return str(error)
    return ""


def planning(rank: int) -> tuple[dict[str, Any], str]:
    return measured_costs(rank), infeasible(rank)


def test_one_plan_for_all_ranks_though_times_differ_and_the_same_refusal() -> None:
    ranks = launch(planning)
    (first, _), (second, _) = ranks
    assert first["costs"] != second["costs"]
    assert first["plan"] == second["plan"]
    for _, said in ranks:
        assert "DistributedDataParallel's buckets 65.00 KiB" in said


def test_a_wrapped_model_is_refused_with_advice(tmp_path: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "s")), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(Net())
        with pytest.raises(CaptureError, match=r"DistributedDataParallel\(optimize\(m\)\)"):
            autockpt.optimize(wrapped, memory_budget="50%")
    finally:
        dist.destroy_process_group()
