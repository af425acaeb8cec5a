"""Module regions inside DistributedDataParallel and FSDP2, set up in other ways."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autockpt
from tests import zoo
from tests.autockpt.test_modules_models import mixtral
from tests.distributed.launch import WORLD, launch
from tests.distributed.test_ddp import peak_beside
from tests.distributed.test_ddp import train as train_ddp
from tests.distributed.test_fsdp import local, peak_of_rank, train
from tests.helpers import equal


def routed_under_ddp(rank: int) -> dict[str, Any]:
    case = mixtral()
    ours: Any = autockpt.optimize(
        copy.deepcopy(case.model), memory_budget="50%", emit="modules", cost="roofline"
    )
    models = [
        DistributedDataParallel(model, find_unused_parameters=True)
        for model in (copy.deepcopy(case.model), ours)
    ]
    losses = [train_ddp(model, case, rank) for model in models]
    states = [model.state_dict().values() for model in models]
    return {
        "same": losses[0] == losses[1] and all(map(equal, *states)),
        "peak": peak_beside(models[1], case, rank),
        "budget": ours.autockpt.report.budget_bytes,
        "cost": ours.autockpt.report.recompute_cost,
    }


def test_a_mixture_of_experts_under_ddp() -> None:
    for found in launch(routed_under_ddp):
        assert found["same"]
        assert found["cost"] > 0
        assert found["peak"] <= found["budget"]


def sharded_otherwise(rank: int, how: str) -> dict[str, Any]:
    case = zoo.gpt2()
    args: Any = ((), case.kwargs) if how == "planned before" else ()
    emit: Any = "auto" if how == "auto" else "modules"
    ours: Any = autockpt.optimize(
        copy.deepcopy(case.model), *args, memory_budget="50%", emit=emit, cost="roofline"
    )
    models: list[nn.Module] = [copy.deepcopy(case.model), ours]
    mesh = init_device_mesh("cpu", (WORLD,))
    for model in models:
        for layer in model.transformer.h:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, reshard_after_forward=how != "kept")
        fully_shard(model, mesh=mesh)
    losses = [train(model, case, rank) for model in models]
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return {
        "same": losses[0] == losses[1] and all(equal(local(p), local(q)) for p, q in pairs),
        "peak": peak_of_rank(ours, case, rank),
        "budget": ours.autockpt.report.budget_bytes,
        "cost": ours.autockpt.report.recompute_cost,
    }


def in_all_ways(rank: int) -> list[dict[str, Any]]:
    return [sharded_otherwise(rank, how) for how in ("planned before", "auto", "kept")]


def test_sharded_in_other_ways() -> None:
    for ways in launch(in_all_ways):
        for found in ways:
            assert found["same"]
            assert found["cost"] > 0
            assert found["peak"] <= found["budget"]
