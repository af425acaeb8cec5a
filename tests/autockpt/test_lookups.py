"""Modules are looked up once in each emitted function, and on the live model at every call."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from solvers.plan import Plan
from tests import zoo
from tests.autockpt.plans import captured
from tests.helpers import assert_same_bits


class Towers(nn.Module):
    """Two lists of layers that take turns, one tensor that two layers share, a lone layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.others = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
        self.others[1].weight = self.others[0].weight
        self.ends = nn.ModuleDict({"last": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        for block, other in zip(self.blocks, self.others, strict=True):
            x = other(block(x)) + x
        return self.ends["last"](x)


def test_layers_are_looked_up_once():
    real = captured(Towers(), (torch.randn(3, 4),))
    code = real.program(Plan()).code
    for line in ("block = self.blocks[0][0]", "other = self.others[0]", "last = self.ends['last']"):
        assert code.count(f"{line}\n") == 1
    assert code.count("self.") == 4
    for plan in (Plan(), Plan.flat([(0, 3)]), Plan.flat([(1, 4), (4, 7)])):
        assert_same_bits(real.step(), real.step(real.emitted(plan)))


def test_nested_lists_of_layers():
    case = zoo.resnet()
    real = captured(case.model, case.args, case.kwargs, case.loss)
    lines = [line.strip() for line in real.program(Plan()).code.splitlines()]
    # Once for the layers, and once for the counts of batches at the end.
    assert lines.count("stage = self.resnet.encoder.stages[1]") == 2
    assert not any(line.count("[") > 1 for line in lines if line.endswith("]"))


def test_a_replaced_layer_is_the_one_that_runs():
    model = Towers()
    real = captured(model, (x := torch.randn(3, 4),))
    emitted = real.program(Plan.flat([(0, 3)])).forward
    other = copy.deepcopy(model)
    other.blocks[0] = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    assert torch.equal(emitted(other, x)[0], other(x))
