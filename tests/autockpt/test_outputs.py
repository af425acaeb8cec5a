"""What a forward returns: rebuilt at each call, or the model's own Python runs."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import ModelOutput

import autockpt
from autockpt.errors import CaptureError, FallbackWarning

NOTHING = (None, None)


class Returning(nn.Module):
    """Returns what it is told to make of its result."""

    def __init__(self, returned: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        )
        self.returned = returned

    def __deepcopy__(self, memo: dict[int, Any]) -> Returning:
        other = Returning(self.returned)
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x: Tensor) -> Any:
        found = self.layers(x)
        return {"loss": found.square().mean(), "found": self.returned(found)}


def planned(model: nn.Module, x: Tensor, **options: Any) -> nn.Module:
    return autockpt.optimize(
        copy.deepcopy(model), (x,), memory_budget="60%", cost="roofline", **options
    )


@dataclass
class Output(ModelOutput):
    loss: Tensor | None = None
    attentions: tuple[Any, ...] | None = None


TWICE: dict[str, Callable[[Tensor], Any]] = {
    "a tuple of none": lambda _: (NOTHING, NOTHING),
    "an empty tuple": lambda _: [(), {"again": ()}],
    "a list": lambda _: (lambda numbers: {"a": numbers, "b": numbers})([1, 2]),
    "an object": lambda _: SimpleNamespace(n=NOTHING, m=NOTHING),
    "inside another": lambda t: (lambda names: {"p": (t, 1), "q": [(names, 2), names]})(("a", "b")),
    "an item and an attribute": lambda t: Output(loss=t.mean(), attentions=NOTHING),
}


@pytest.mark.parametrize("kind", sorted(TWICE))
def test_what_is_held_twice_and_holds_no_tensor(kind: str) -> None:
    torch.manual_seed(0)
    model, x, other = Returning(TWICE[kind]), torch.randn(64, 32), torch.randn(64, 32)
    ours = planned(model, x, emit="graph")
    for batch in (x, other):
        assert repr(ours(batch)["found"]) == repr(model(batch)["found"])


def test_attentions_that_a_fused_kernel_does_not_give() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=2,
        vocab_size=50,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    tokens = torch.randint(50, (2, 16))
    batch = {"input_ids": tokens, "labels": tokens, "output_attentions": True}
    model = GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").train()
    ours = autockpt.optimize(model, kwargs=batch, memory_budget="60%", emit="graph")
    assert autockpt.verify(model, ours, kwargs=batch)
    assert ours(**batch).attentions == model(**batch).attentions


def closure(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


HIDDEN: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "deque": (lambda t: collections.deque([t]), lambda found: found[0]),
    "set": (lambda t: {t}, lambda found: next(iter(found))),
    "view of a dict": (lambda t: {"a": t}.values(), lambda found: next(iter(found))),
    "key": (lambda t: {t: 1}, lambda found: next(iter(found))),
    "generator": (lambda t: (item for item in [t]), next),
    "iterator": (lambda t: zip([t], [1], strict=True), lambda found: next(found)[0]),
    "partial": (lambda t: functools.partial(torch.add, t), lambda found: found.args[0]),
    "closure": (closure, lambda found: found()),
    "method": (lambda t: t.sum, lambda found: found.__self__),
    "deep": (
        lambda t: functools.reduce(lambda inner, _: [inner], range(14), t),
        lambda found: functools.reduce(lambda outer, _: outer[0], range(14), found),
    ),
}


@pytest.mark.parametrize("kind", sorted(HIDDEN))
def test_tensors_where_they_cannot_be_put_anew(kind: str) -> None:
    returned, taken = HIDDEN[kind]
    torch.manual_seed(0)
    model, x, other = Returning(returned), torch.randn(64, 32), torch.randn(64, 32)
    with pytest.raises(CaptureError, match=r"holds a tensor of this step, and cannot be rebuilt"):
        planned(model, x, emit="graph")
    with pytest.warns(FallbackWarning):
        ours = planned(model, x)
    for batch in (x, other):
        expected, found = (taken(m(batch)["found"]) for m in (model, ours))
        assert torch.equal(found, expected)


def test_what_was_there_before_may_be_held_by_anything() -> None:
    scale = torch.ones(3)
    model = Returning(lambda _: functools.partial(torch.mul, scale))
    ours = planned(model, torch.randn(64, 32), emit="graph")
    assert ours(torch.randn(64, 32))["found"].args[0] is scale
