"""One training loop in all its forms: precision, accumulation, compiled or not.

A plain model and an optimized one go through the same loop, and what is left is compared.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import autockpt
from tests.costs import dear_draws
from tests.helpers import equal, loss_of
from tests.zoo import Case

STEPS = 2
Precision = Literal["fp32", "autocast", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a loop is written."""

    precision: Precision = "fp32"
    parts: int = 1
    backend: str | None = None

    def __str__(self) -> str:
        return f"{self.precision}-{self.parts}-{self.backend or 'eager'}"


FORMS = [
    Form(precision=precision, parts=parts, backend=backend)
    for backend, precision, parts in itertools.product(
        (None, "aot_eager"), ("fp32", "autocast"), (1, 3)
    )
]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a loop leaves behind.

    Attributes
    ----------
    tensors : tuple of Tensor
        Losses, then parameters, gradients, buffers and the random state.
    """

    tensors: tuple[Tensor | None, ...]

    def same_bits(self, other: Outcome) -> bool:
        pairs = itertools.zip_longest(self.tensors, other.tensors)
        return all(equal(*pair) for pair in pairs)


def run(case: Case, form: Form, wrap: Callable[[nn.Module], nn.Module] = lambda m: m) -> Outcome:
    """Train a copy of the case's model; ``wrap`` makes of it what is called."""
    own = copy.deepcopy(case.model)
    args, kwargs = case.args, case.kwargs
    if form.precision == "bf16":
        own.to(torch.bfloat16)
        args, kwargs = _halved(args), _halved(kwargs)
    called = wrap(own)
    if form.backend is not None:
        torch._dynamo.reset()
        called = torch.compile(called, backend=form.backend)  # type: ignore[assignment]
    losses = []
    optimizer = torch.optim.SGD(called.parameters(), 1e-2, momentum=0.9)
    for step in range(STEPS):
        for part in range(form.parts):
            torch.manual_seed(10 * step + part)
            with _surroundings(form):
                loss = loss_of(called(*args, **kwargs), case.loss) / form.parts
            loss.backward()
            losses.append(loss.detach().clone())
        nn.utils.clip_grad_norm_(called.parameters(), 1.0)
        optimizer.step()
        # The last gradients stay, to be compared.
        if step < STEPS - 1:
            optimizer.zero_grad()
    gradients = [parameter.grad for parameter in called.parameters()]
    state = [*own.parameters(), *own.buffers()]
    return Outcome(tensors=(*losses, *state, *gradients, torch.get_rng_state()))


def optimized(
    case: Case, form: Form, budget: str, into: list[Any], **settings: Any
) -> Callable[..., Any]:
    """Give a ``wrap`` that optimizes, and puts the model into a list for who asks afterwards.

    What is compiled is planned before: a first call that has to be planned runs eagerly.
    """
    batch = {"args": case.args, "kwargs": case.kwargs} if form.backend else {}

    def wrap(model: nn.Module) -> nn.Module:
        with _surroundings(form):
            ours = autockpt.optimize(
                model, memory_budget=budget, loss=case.loss, cost=dear_draws, **batch, **settings
            )
        into.append(ours)
        return ours

    return wrap


@contextlib.contextmanager
def _surroundings(form: Form) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16, enabled=form.precision == "autocast"):
        yield


def _halved(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, value
    )
