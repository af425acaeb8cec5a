"""Explicit generators: what a graph can hold of them, and that planning moves none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import autockpt

WIDTH = 16


class Noisy(nn.Module):
    """Layers whose input is multiplied by what an explicit generator draws."""

    def __init__(self, draw: Callable[[Noisy, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.draw, self.generator = draw, Generator().manual_seed(9)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)) * self.draw(self, x)
        return x.square().mean()


def made(model: Noisy, x: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=Generator().manual_seed(3))


def permuted(model: Noisy, x: Tensor) -> Tensor:
    return x[torch.randperm(len(x), generator=Generator().manual_seed(3))]


def seeded(model: Noisy, x: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=model.generator.manual_seed(5))


def set_back(model: Noisy, x: Tensor) -> Tensor:
    model.generator.set_state(Generator().manual_seed(4).get_state())
    return torch.empty_like(x).normal_(generator=model.generator)


def seeded_last(model: Noisy, x: Tensor) -> Tensor:
    drawn = torch.rand(x.shape, generator=model.generator)
    model.generator.manual_seed(1)
    return drawn


def drawn(model: Noisy, x: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=model.generator)


def two_steps(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients of two steps, from the same state of the model's generator."""
    generator: Any = model.generator
    before = generator.get_state()
    model.zero_grad()
    for _ in range(2):
        model(x).backward()
    generator.set_state(before)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("draw", [made, permuted, seeded, set_back, seeded_last, drawn])
def test_bits_are_equal_and_no_generator_is_moved(draw: Callable[[Noisy, Tensor], Tensor]) -> None:
    model, x = Noisy(draw), torch.randn(64, WIDTH)
    before = model.generator.get_state()
    ours: Any = autockpt.optimize(model, (x,), memory_budget="100%", cost="roofline")
    assert torch.equal(model.generator.get_state(), before)
    assert autockpt.verify(model, ours, (x,)).same_bits
    assert torch.equal(model.generator.get_state(), before)
    assert all(map(torch.equal, two_steps(model, x), two_steps(ours, x)))


@pytest.mark.parametrize(
    ("draw", "what"),
    [
        (made, "neither an argument nor an attribute"),
        (permuted, "neither an argument nor an attribute"),
        (seeded, "seeds a torch.Generator"),
        (set_back, "seeds a torch.Generator"),
        (seeded_last, "seeds a torch.Generator"),
    ],
)
def test_no_graph_holds_one_that_is_made_or_seeded(
    draw: Callable[[Noisy, Tensor], Tensor], what: str
) -> None:
    with pytest.raises(autockpt.CaptureError, match=what):
        autockpt.optimize(
            Noisy(draw), (torch.randn(64, WIDTH),), memory_budget="100%", emit="graph"
        )


def test_one_that_only_draws_is_in_the_graph_beside_regions() -> None:
    model, x = Noisy(drawn), torch.randn(512, WIDTH)
    ours: Any = autockpt.optimize(model, (x,), memory_budget="80%", cost="roofline", emit="graph")
    assert ours.autockpt.plan.regions
    assert all(map(torch.equal, two_steps(model, x), two_steps(ours, x)))
