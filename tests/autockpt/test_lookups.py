"""Modules are looked up once in each emitted function, and on the live model at every call."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
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


class Names(nn.Module):
    """Members that no list shows under the obvious key, and names that our own code uses."""

    def __init__(self) -> None:
        super().__init__()
        self.sliced = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])[2:5]
        turned = [("3", nn.Linear(4, 4)), ("0", nn.Linear(4, 4))]
        self.turned = nn.Sequential(OrderedDict(turned))
        self.strange = Strange([nn.Linear(4, 4) for _ in range(3)])
        for name in ("tensor", "tensor_2", "keep", "replay", "layer"):
            setattr(self, name, nn.LayerNorm(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.strange[0](self.turned(self.sliced(x)).tanh()).tanh()
        for name in ("tensor", "tensor_2", "keep", "replay", "layer"):
            x = getattr(self, name)(x).tanh()
        return x


class Strange(nn.ModuleList):
    """Counts from the end."""

    def __getitem__(self, index: int) -> nn.Module:
        return super().__getitem__(-1 - index)


def test_members_are_read_by_what_leads_to_them():
    real = captured(Names(), (torch.randn(3, 4),))
    steps = len(real.problem.ops)
    for plan in (Plan(), Plan.flat([(0, 4), (4, 9)]), Plan.flat([(1, steps - 3)])):
        assert_same_bits(real.step(), real.step(real.emitted(plan)))


@pytest.mark.parametrize(
    "index", [lambda x: (x * float("inf"))[0], lambda x: (x - (1 + 2j))[0], lambda x: (-x)[0]]
)
def test_an_index_is_one_of_the_whole_expression(index):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return index(self.linear(x).tanh()).real.tanh()

    real = captured(Net(), (torch.randn(3, 4),))
    assert_same_bits(real.step(), real.step(real.emitted(Plan())))
