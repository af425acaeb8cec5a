"""FSDP2 on two real processes: same bits, inside the budget, no word about planning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import autockpt
from autockpt.errors import CaptureError
from tests import zoo
from tests.distributed.launch import launch
from tests.helpers import equal, peak_above_start

MODELS = {"gpt2": (zoo.gpt2, "transformer.h"), "vit": (zoo.vit, "vit.layers")}
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": None}


def sharded(model: nn.Module, layers: str, policy: dict[str, Any]) -> nn.Module:
    """Shard as people do: every layer, then the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**policy)}
    for layer in model.get_submodule(layers):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def share(case: zoo.Case, rank: int, step: int) -> dict[str, Any]:
    """A batch of this rank's own: the case's samples in another order."""
    rng = torch.Generator().manual_seed(10 * step + rank)
    return {name: t[torch.randperm(len(t), generator=rng)] for name, t in case.kwargs.items()}


def train(model: nn.Module, case: zoo.Case, rank: int, steps: int = 3) -> list[float]:
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


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def peak_of_rank(model: nn.Module, case: zoo.Case, rank: int) -> int:
    """Peak of a step as the allocator saw it, with what this rank held when it started."""
    kwargs = share(case, rank, 0)
    there = [*model.parameters(), *model.buffers(), *kwargs.values()]
    there += [p.grad for p in model.parameters() if p.grad is not None]
    resident = sum(t.nbytes for t in {id(t): local(t) for t in there}.values())
    return resident + peak_above_start(lambda: model(**kwargs).loss.backward())


def three_steps(rank: int, name: str, policy: dict[str, Any], budget: str) -> dict[str, Any]:
    build, layers = MODELS[name]
    case = build()
    ours: Any = autockpt.optimize(
        copy.deepcopy(case.model), memory_budget=budget, emit="modules", cost="roofline"
    )
    plain = sharded(copy.deepcopy(case.model), layers, policy)
    wrapped = sharded(ours, layers, policy)
    losses = [train(model, case, rank) for model in (plain, wrapped)]
    pairs = zip(plain.parameters(), wrapped.parameters(), strict=True)
    same = all(equal(local(p), local(q)) for p, q in pairs)
    report = ours.autockpt.report
    return {
        "losses": losses,
        "same": same,
        "peaks": [peak_of_rank(model, case, rank) for model in (plain, wrapped)],
        "budget": report.budget_bytes,
        "cost": report.recompute_cost,
        "code": ours.autockpt.code,
        "notes": report.notes,
        "steps": len(ours.autockpt._entries),
    }


@pytest.mark.parametrize(
    ("name", "policy"), [("gpt2", {}), ("gpt2", BF16), ("vit", {})], ids=["gpt2", "bf16", "vit"]
)
def test_three_steps_are_equal_and_inside_the_budget(name: str, policy: dict[str, Any]) -> None:
    ranks = launch(three_steps, name, policy, "45%")
    for found in ranks:
        assert found["losses"][0] == found["losses"][1]
        assert found["same"]
        assert found["cost"] > 0
        assert found["steps"] == 1
        plain, planned = found["peaks"]
        assert planned <= found["budget"] < plain
        assert any("gathered parameters" in note for note in found["notes"])
    assert ranks[0]["code"] == ranks[1]["code"]
    assert ranks[0]["losses"] != ranks[1]["losses"]


def uneven(rank: int) -> list[bool]:
    """The last batch of one rank is shorter: it plans alone, and nobody waits for it."""
    case = zoo.gpt2()
    results = []
    models = [
        sharded(copy.deepcopy(case.model), "transformer.h", {}),
        sharded(
            autockpt.optimize(
                copy.deepcopy(case.model), memory_budget="45%", emit="modules", cost="roofline"
            ),
            "transformer.h",
            {},
        ),
    ]
    for length in (128, 128 - 32 * rank, 128):
        kwargs = {key: t[:, :length] for key, t in case.kwargs.items()}
        gradients = []
        for model in models:
            torch.manual_seed(rank)
            model.zero_grad()
            model(**kwargs).loss.backward()
            gradients.append([local(p.grad).clone() for p in model.parameters()])
        results.append(all(map(equal, *gradients)))
    results.append(len(models[1].autockpt._entries) == (2 if rank else 1))
    return results


def refusals(rank: int) -> list[str]:
    case = zoo.gpt2()
    messages = []
    wrapped = sharded(copy.deepcopy(case.model), "transformer.h", {})
    graph = sharded(
        autockpt.optimize(copy.deepcopy(case.model), memory_budget="45%", emit="graph"),
        "transformer.h",
        {},
    )
    mlp: Any = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallel = parallelize_module(
        autockpt.optimize(mlp, memory_budget="45%", emit="modules"), mesh, {"0": ColwiseParallel()}
    )
    for call in (
        lambda: autockpt.optimize(wrapped, memory_budget="45%", emit="modules"),
        lambda: graph(**case.kwargs),
        lambda: parallel(torch.ones(4, 8)),
    ):
        with pytest.raises(CaptureError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def alone(rank: int) -> tuple[list[bool], list[str]]:
    return uneven(rank), refusals(rank)


def test_a_rank_with_another_shape_plans_alone_and_refusals_say_what_to_do() -> None:
    for equal_and_alone, (wrapped, graph, parallel) in launch(alone):
        assert all(equal_and_alone)
        assert "Optimize first" in wrapped
        assert "emit='modules' before it is sharded" in graph
        assert "tensor parallelism" in parallel
