"""Captured steps of test models, and random plans for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autockpt.capture import Capture, record
from autockpt.lower import lower
from autockpt.pipeline import random_ops, saving_ops
from autockpt.profiler import profile
from autockpt.rewrite import Program, rewrite
from solvers.plan import Plan, Region
from solvers.problem import Problem
from solvers.simulate import idle_ops
from tests.helpers import Step, buffers_restored, leaves, run_step


@dataclass(frozen=True)
class Captured:
    """A recorded step, and the model and batch that it was recorded from."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None
    capture: Capture
    problem: Problem

    def program(self, plan: Plan) -> Program:
        return rewrite(
            self.capture,
            plan,
            root=self.model,
            random=random_ops(self.problem),
            idle=idle_ops(self.problem, plan),
            saving=saving_ops(self.problem),
        )

    def emitted(self, plan: Plan) -> Emitted:
        return Emitted(self.model, self.capture, self.program(plan))

    def step(self, model: nn.Module | None = None, *, seed: int = 7) -> Step:
        """One step from equal seeds, buffers as they were at its start."""
        chosen = self.model if model is None else model
        with buffers_restored(self.model):
            return run_step(chosen, self.args, self.kwargs, self.loss or total, seed=seed)


class Emitted(nn.Module):
    """Runs a program in place of a model's forward; names parameters as the model does."""

    def __init__(self, model: nn.Module, capture: Capture, program: Program) -> None:
        super().__init__()
        self.__dict__["model"] = model
        self._capture, self._program = capture, program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self._capture.inputs.tensors(args, kwargs)
        return self._capture.outputs.build(self._program.forward(self.model, *tensors))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_buffers(*args, **kwargs)


def total(output: Any) -> Tensor:
    """The output's loss, else the sum of what is differentiable in it."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    terms = [t.sum() for t in leaves(output) if t.requires_grad and t.is_floating_point()]
    return torch.stack([t.double() for t in terms]).sum()


def captured(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Captured:
    """Record a step and lower it."""
    kwargs = kwargs or {}
    capture, recorded = record(model, args, kwargs, loss)
    facts = profile(capture, model, args, kwargs, cost="roofline", closures=recorded.closures)
    return Captured(model, args, kwargs, loss, capture, lower(capture, facts))


def random_plan(problem: Problem, seed: int, *, depth: int = 3) -> Plan:
    """Random regions, nested up to ``depth`` deep, where regions are allowed."""
    rng = random.Random(seed)
    return Plan(regions=_regions(problem, rng, 0, len(problem.ops), depth))


def one_region(problem: Problem) -> Plan:
    """The largest regions that there can be: what lies between pinned ops."""
    free = [not op.pinned for op in problem.ops] + [False]
    regions, start = [], None
    for index, allowed in enumerate(free):
        if allowed and start is None:
            start = index
        if not allowed and start is not None:
            regions.append(Region(start=start, stop=index))
            start = None
    return Plan(regions=tuple(r for r in regions if _legal(problem, r.start, r.stop)))


def _legal(problem: Problem, start: int, stop: int) -> bool:
    pinned = any(op.pinned for op in problem.ops[start:stop])
    return start < stop and problem.boundaries[start] and problem.boundaries[stop] and not pinned


def _regions(
    problem: Problem, rng: random.Random, low: int, high: int, depth: int
) -> tuple[Region, ...]:
    edges = [i for i in range(low, high + 1) if problem.boundaries[i]]
    chosen = sorted(rng.sample(edges, min(len(edges), 2 * rng.randint(1, 8))))
    pairs = [p for p in zip(chosen[::2], chosen[1::2], strict=False) if _legal(problem, *p)]
    nested = depth > 1
    return tuple(
        Region(
            start=start,
            stop=stop,
            children=_regions(problem, rng, start, stop, depth - 1)
            if nested and rng.random() < 0.7
            else (),
        )
        for start, stop in pairs
        if (start, stop) != (low, high)
    )
