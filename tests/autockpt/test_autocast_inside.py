"""Autocast entered in the forward: a weight that it casts once is cast once, regions or not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autockpt
from tests.costs import dear_draws
from tests.helpers import assert_same_bits, run_step


class Tied(nn.Module):
    """A block that runs several times, and an embedding that is the last layer's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.embedding(tokens)
            for _ in range(4):
                x = self.block(x)
            return F.linear(x, self.embedding.weight).float().square().mean()


class Decorated(Tied):
    """The same, by a decorator."""

    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


class Interrupted(Tied):
    """One block in the middle runs without autocast, with the same weights."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.block(self.embedding(tokens))
            with torch.autocast("cpu", enabled=False):
                x = self.block(x.float())
            x = self.block(self.block(x))
            return F.linear(x, self.embedding.weight).float().square().mean()


@pytest.mark.parametrize("cost", ["roofline", dear_draws])
@pytest.mark.parametrize("budget", ["70%", "45%"])
@pytest.mark.parametrize("kind", [Tied, Decorated, Interrupted])
@pytest.mark.filterwarnings("ignore::autockpt.FallbackWarning")
def test_gradients_of_a_shared_weight_are_added_up_before_the_cast(
    kind: type[Tied], budget: str, cost: Any
) -> None:
    torch.manual_seed(0)
    plain, tokens = kind().train(), torch.randint(20, (4, 16))
    ours = autockpt.optimize(copy.deepcopy(plain), (tokens,), memory_budget=budget, cost=cost)
    assert ours.autockpt.plan.regions
    # Parted blocks may be more than a graph can hold; one block is not.
    assert kind is Interrupted or not ours.autockpt.over_modules
    for seed in (1, 2):
        steps = [run_step(model, (tokens,), seed=seed) for model in (plain, ours)]
        assert_same_bits(*steps)
