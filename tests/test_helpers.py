"""The tools of the tests can fail, each in its own way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import helpers, zoo


class Block(nn.Module):
    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.again = again

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again:
            return checkpoint(self._inner, x, use_reentrant=False)
        return self._inner(x)


def case(*, again: bool) -> zoo.Case:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(again=again) for _ in range(4)])
    return zoo.Case(model, (torch.randn(512, 64),), {}, torch.mean)


def test_recomputation_is_counted_to_the_op() -> None:
    plain, again = case(again=False), case(again=True)
    helpers.assert_same_bits(helpers.run_case(plain), helpers.run_case(again))
    # Each block runs its first matmul and its tanh again; the last one stops early.
    more = helpers.recomputed_calls(plain, again.model)
    assert more["aten.addmm.default"] == 4
    assert more["aten.tanh.default"] == 4
    matmul = 2 * 512 * 64 * 64
    flops = [helpers.count_flops(lambda c=c: helpers.run_case(c)) for c in (plain, again)]
    assert flops[1] - flops[0] == 4 * matmul


def test_the_peak_sees_checkpoints() -> None:
    plain = helpers.activation_peak_bytes(*case(again=False))
    again = helpers.activation_peak_bytes(*case(again=True))
    # One activation a block that is not kept: the tanh, each 128 KiB.
    assert plain - again == pytest.approx(3 * 512 * 64 * 4, rel=0.34)


def test_differences_are_named() -> None:
    step = helpers.run_case(case(again=False))
    helpers.assert_same_bits(step, step)
    none = {"0.first.weight": None}
    for change, words in (
        ({"loss": step.loss + 1e-7}, "loss"),
        ({"outputs": ()}, "1 outputs against 0"),
        ({"gradients": step.gradients | none}, "gradients 0.first.weight"),
        ({"gradients": {}}, "names of gradients"),
        ({"random_state": step.random_state ^ 1}, "random state"),
    ):
        with pytest.raises(AssertionError, match=words):
            helpers.assert_same_bits(step, replace(step, **change))
