"""What bit real people: every situation of ``reports.md``, equal to the bit or clearly refused."""

from __future__ import annotations

import linecache
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autockpt
from autockpt.errors import CaptureError, InfeasibleError
from tests.helpers import CallCounter, equal, leaves

TEXT = (Path(__file__).parent / "reports.md").read_text()
PRELUDE, *_ = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SNIPPETS = dict(re.findall(r"^## (\w+)\n.*?```python\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE))

# What may be refused, and the words that name the cause.
REFUSED = {
    "I1": "autograd runs",
    "L2": r"TorchFunctionMode \(Half\)",
}
# What no graph can hold: regions are calls of modules, or emit="graph" refuses.
NO_GRAPH = {
    "E1": "writes attribute 'calls'",
    "E2": "writes the list '0.past'",
    "E6": "writes the list 'LOG'",
    "F3": "writes the list 'feats'",
}
# Where the plan has no region: what its ops keep for backward is no saved tensor (I7).
PLAIN = {"I7"}
NO_BACKWARD = {"L4", "O1"}
MECHANICS = {"aten.detach.default", "aten.clone.default", "aten.alias.default"}


def situation(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    source, file = PRELUDE + SNIPPETS[name], f"<report {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    space: dict[str, Any] = {"__name__": "situation"}
    exec(compile(source, file, "exec"), space)
    return space


def step(space: dict[str, Any], model: nn.Module) -> list[Any]:
    """One step, and all that it made: results, gradients, buffers, what hooks have collected."""
    args, kwargs = space["args"], space.get("kwargs", {})
    inputs = [t for t in leaves([args, kwargs]) if t.requires_grad]
    for tensor in (*inputs, *model.parameters()):
        tensor.grad = None
    if "step" in space:
        results: Any = space["step"](model)
    else:
        results = model(*args, **kwargs)
        terms = [t.float().sum() for t in leaves(results) if t.requires_grad]
        torch.stack(terms).sum().backward()
    found = results if isinstance(results, (list, torch.Size)) else list(leaves(results))
    found = [item.detach().clone() if isinstance(item, Tensor) else item for item in found]
    found += [None if t.grad is None else t.grad.clone() for t in (*model.parameters(), *inputs)]
    found += [buffer.clone() for buffer in model.buffers()]
    found += [getattr(module, "seen", None) for module in model.modules()]
    found += [*space.get("calls", ()), torch.get_rng_state()]
    if "calls" in space:
        space["calls"].clear()
    return found


def steps(space: dict[str, Any], model: nn.Module) -> tuple[list[Any], CallCounter]:
    found: list[Any] = []
    with CallCounter() as counter:
        for seed in (1, 2):
            torch.manual_seed(seed)
            random.seed(seed)
            found += step(space, model)
            for module in model.modules():
                vars(module).get("past", []).clear()  # as E2 says
    if "after" in space:
        found += list(leaves(space["after"](model)))
        model.train()
    return found, counter


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape if a.is_meta else equal(a, b)
    return type(a) is type(b) and bool(a == b)


@contextmanager
def state_kept(space: dict[str, Any]) -> Iterator[None]:
    model = space["model"]
    training = [module.training for module in model.modules()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    yield
    for module, mode in zip(model.modules(), training, strict=True):
        module.training = mode
    for buffer, copy in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(copy)


@pytest.mark.parametrize("name", [name for name in SNIPPETS if name not in REFUSED])
def test_equal_to_the_bit(name: str) -> None:
    budget: int | str = "50%"
    for _ in range(4):
        space = situation(name)
        model, call = space["model"], (space["args"], space.get("kwargs"))
        try:
            optimized = autockpt.optimize(model, *call, memory_budget=budget, cost="roofline")
            with state_kept(space):
                found, ours = steps(space, optimized)
            break
        except InfeasibleError as error:
            # Under autocast, say, a step keeps more than the one that was planned first.
            budget = error.minimum_bytes or 0
    expected, plain = steps(space, model)
    assert len(found) == len(expected)
    assert all(map(alike, found, expected))
    plan = optimized.autockpt.plan
    more = {call for call in ours.calls - plain.calls if call not in MECHANICS}
    assert bool(plan.regions) == (name not in PLAIN)
    assert bool(more) == bool(plan.regions) or name in NO_BACKWARD


@pytest.mark.parametrize("name", NO_GRAPH)
def test_no_graph_can_hold_it(name: str) -> None:
    space = situation(name)
    with pytest.raises(CaptureError, match=NO_GRAPH[name]):
        autockpt.optimize(space["model"], space["args"], memory_budget="50%", emit="graph")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_cause(name: str) -> None:
    space = situation(name)
    with pytest.raises(CaptureError, match=REFUSED[name]):
        optimized = autockpt.optimize(
            space["model"], space["args"], memory_budget="50%", cost="roofline"
        )
        step(space, optimized)


def test_all_situations_are_here() -> None:
    assert len(SNIPPETS) == 80
    assert set(REFUSED) <= set(SNIPPETS)
