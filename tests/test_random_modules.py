"""Random small modules, random plans: predicted peaks are the measured ones.

To the byte, and bits are equal. Left out is what the model knows to be a few bytes off: numbers
of python that an op saves (8 bytes each), biases of linears in regions (their gradient comes
after the input is let go of), and copies of running statistics in a replay; and every value
reaches the loss, as a region that runs something for nothing holds the graph behind it.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autockpt.capture import record
from autockpt.lower import lower
from autockpt.pipeline import saving_ops
from autockpt.profiler import profile
from autockpt.rewrite import rewrite
from autockpt.step import measure
from solvers.judge.holding import alive_at_peak
from solvers.plan import Plan
from solvers.simulate import idle_ops, simulate
from tests.helpers import assert_same_bits, buffers_restored, run_case
from tests.prologues import with_random_kept, with_random_prologues
from tests.test_judge import Emitted, _renamed, random_plan
from tests.zoo import Case

WIDTH = 8
UNARY = (
    "linear",
    "shared linear",
    "layer_norm",
    "dropout",
    "relu",
    "tanh",
    "relu_",
    "neg_",
    "view",
    "transpose",
    "expand",
    "split",
    "chunk cat",
    "slice",
    "detached",
    "double",
    "softmax",
    "power",
)
BINARY = ("add", "mul", "cat", "add_", "matmul", "where")

Step = tuple[str, int, int]


class Random(nn.Module):
    """Runs a list of steps on a growing list of (rows, 8) tensors."""

    def __init__(self, steps: tuple[Step, ...], *, trained_input: bool) -> None:
        super().__init__()
        self.steps = steps
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in steps)
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.trained_input = trained_input

    def forward(self, x: Tensor) -> Tensor:
        values = [x if self.trained_input else self.shared(x)]
        unread = {0}
        for index, (kind, first, second) in enumerate(self.steps):
            places = [len(values) - 1 - choice % len(values) for choice in (first, second)]
            unread -= set(places if kind in BINARY else places[:1])
            unread.add(len(values))
            values.append(self.apply_step(kind, index, *(values[place] for place in places)))
        total = values[-1]
        for place in sorted(unread)[:-1]:
            total = total + values[place]
        return total

    def apply_step(self, kind: str, index: int, a: Tensor, b: Tensor) -> Tensor:
        ops: dict[str, Any] = {
            "linear": lambda: self.linears[index](a),
            "shared linear": lambda: self.shared(a),
            "layer_norm": lambda: self.norm(a),
            "dropout": lambda: F.dropout(a, 0.5),
            "relu": lambda: a.relu(),
            "tanh": lambda: a.tanh(),
            "relu_": lambda: (a + 1).relu_(),
            "neg_": lambda: (a + 2).neg_(),
            "view": lambda: a.view(2, -1, WIDTH).flip(0).view(-1, WIDTH),
            "transpose": lambda: a.t().tanh().t(),
            "expand": lambda: a + a[:1].expand(a.shape[0], -1),
            "split": lambda: torch.cat(a.split(4, dim=1)[::-1], dim=1),
            "chunk cat": lambda: torch.cat([half.sigmoid() for half in a.chunk(2)]),
            "slice": lambda: F.pad(a[:, 2:], (0, 2)),
            "detached": lambda: a + a.detach().tanh(),
            "double": lambda: a.double().tanh().float(),
            "softmax": lambda: a.softmax(-1),
            "power": lambda: a.clamp(-2, 2) ** 2,
            "add": lambda: a + b,
            "mul": lambda: a * b,
            "cat": lambda: torch.cat([a, b], dim=1)[:, ::2].contiguous(),
            "add_": lambda: (a + 2).add_(b),
            "matmul": lambda: a @ b[:WIDTH].tanh(),
            "where": lambda: torch.where(a > 0, a, b),
        }
        return ops[kind]()  # type: ignore[no-any-return]


STEPS = st.lists(
    st.tuples(st.sampled_from(UNARY + BINARY), st.integers(0, 3), st.integers(0, 5)),
    min_size=2,
    max_size=14,
)
LOSSES = {
    "square": lambda y: (y * y).mean(),
    "weighted": lambda y: (y * torch.linspace(0, 1, WIDTH)).square().sum(),
    # Gradients that arrive expanded, and transposed.
    "sum": lambda y: y.sum(),
    "rows": lambda y: y.mean(0).square().sum(),
    "transposed": lambda y: (y.t() @ torch.linspace(0, 1, len(y))).square().sum(),
}


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    # Shrinking takes minutes here, and finds little: the steps are few.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    steps=STEPS,
    rows=st.sampled_from([16, 64]),
    trained_input=st.booleans(),
    loss=st.sampled_from(sorted(LOSSES)),
    seed=st.integers(0, 1000),
)
def test_predicted_is_measured_to_the_byte(
    steps: list[Step], rows: int, trained_input: bool, loss: str, seed: int
) -> None:
    torch.manual_seed(seed)
    model = Random(tuple(steps), trained_input=trained_input).train()
    x = torch.randn(rows, WIDTH).requires_grad_(trained_input)
    case = Case(model, (x,), {}, LOSSES[loss])
    plain = run_case(case)
    capture, recorded = record(model, case.args, case.kwargs, case.loss)
    facts = profile(capture, model, case.args, case.kwargs, closures=recorded.closures, cost=_cost)
    problem = lower(capture, facts)
    draws = [index for index, op in enumerate(problem.ops) if op.random]
    for plan in (
        Plan(),
        random_plan(problem, 6, seed),
        random_plan(problem, 20, seed + 1, nested=True),
        with_random_prologues(problem, random_plan(problem, 6, seed + 2), random.Random(seed)),
        with_random_kept(problem, random_plan(problem, 9, seed + 3), random.Random(seed)),
    ):
        idle = idle_ops(problem, plan)
        program = rewrite(
            capture, plan, root=model, random=draws, idle=idle, saving=saving_ops(problem)
        )
        emitted = Emitted(model, capture, program)
        with buffers_restored(model):
            found = run_case(Case(emitted, case.args, case.kwargs, case.loss))
        assert_same_bits(plain, _renamed(found))
        predicted = simulate(problem, plan)
        resident = measure(emitted, case.args, case.kwargs, loss=case.loss)
        fresh = measure(emitted, case.args, case.kwargs, loss=case.loss, gradients="fresh")
        assert predicted.resident_peak_bytes == resident.peak_bytes, plan
        assert predicted.fresh_peak_bytes == fresh.peak_bytes, plan
        holding = alive_at_peak(problem, plan)
        parts = sum(held.nbytes for held in holding.held) + holding.fixed_bytes
        assert parts + holding.gradient_bytes + holding.workspace_bytes == predicted.peak_bytes


def _cost(_: object) -> int:
    return 1
