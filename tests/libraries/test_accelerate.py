"""accelerate: optimize, then ``accelerator.prepare``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autockpt
from tests import zoo
from tests.distributed.launch import launch
from tests.helpers import equal


def train(model: nn.Module, steps: int = 4, **arguments: Any) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    tokens = torch.randint(1, 256, (16, 64))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **arguments)
    loader: Any = DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for (ids,) in loader:
        with accelerator.accumulate(model):
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return accelerator.unwrap_model(model), losses[:steps]


def both(rank: int = 0, **arguments: Any) -> tuple[bool, int, list[list[float]]]:
    case = zoo.gpt2(layers=2)
    plain, first = train(copy.deepcopy(case.model), **arguments)
    AcceleratorState._reset_state()
    ours: Any = autockpt.optimize(
        case.model, memory_budget="60%", cost="roofline", solver="interval_dp"
    )
    trained, second = train(ours, **arguments)
    AcceleratorState._reset_state()
    assert trained is ours
    same = all(map(equal, plain.parameters(), ours.parameters()))
    return same, len(ours.autockpt.plan.regions), [first, second]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_same_losses_and_weights(precision: str) -> None:
    same, regions, (expected, found) = both(mixed_precision=precision)
    assert same
    assert regions
    assert expected == found


def test_on_two_processes() -> None:
    first, second = launch(both)
    for same, regions, (expected, found) in (first, second):
        assert same
        assert regions
        assert expected == found
    assert first[2] != second[2]
