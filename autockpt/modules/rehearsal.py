"""Forwards that are only run: which modules they call, and what they change."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._compile import _disable_dynamo

from autockpt.capture.refusals import drop, gone
from autockpt.capture.restore import RandomState
from autockpt.modules.parts import Forward, calling
from autockpt.modules.state import watch_module
from autockpt.modules.unwritten import unwritten

MOST_REHEARSALS = 16
FEW_REHEARSALS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A forward without a recording: what it found, called and changed.

    Attributes
    ----------
    start, end : RandomState
        Random states around it.
    counts : dict of str to int
        Calls with grad by the path of the module.
    changed : tuple of str
        Modules whose attributes it changed.
    python : bool
        Whether it drew from Python's or numpy's generator.
    uncalled : bool
        Whether it left out a module that has neighbours which it called.
    """

    start: RandomState
    end: RandomState
    counts: dict[str, int]
    changed: tuple[str, ...]
    python: bool
    uncalled: bool

    @property
    def calls(self) -> int:
        """Calls of modules with grad."""
        return sum(self.counts.values())


def fullest(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, alone: bool
) -> Rehearsal:
    """Run forwards, each with draws of its own, until one calls all modules that have neighbours.

    Modules that are called or not by their input, not by a draw, make no difference: a few
    forwards with the same calls are enough.
    """
    here = RandomState()
    found: list[Rehearsal] = []
    if not alone:
        # A forward that seeds these must not find them as an earlier one has left them.
        random.random()
        np.random.random()
    try:
        while len(found) < MOST_REHEARSALS:
            found.append(_rehearse(model, args, kwargs))
            last = found[-1]
            still = last.python is False and last.end.torch_is(last.start)
            if alone or still or not last.uncalled:
                break
            if len(found) == FEW_REHEARSALS and all(r.counts == last.counts for r in found):
                break
            last.end.restore()
    finally:
        here.restore()
    changed = tuple(dict.fromkeys(name for r in found for name in r.changed))
    best = max(found, key=lambda r: r.calls)
    return replace(best, changed=changed)


class _Counter:
    """The caller that counts what is called with grad."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self.counts: dict[str, int] = {}

    def call(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path = self._names.get(id(module))
        if path is not None and torch.is_grad_enabled():
            self.counts[path] = self.counts.get(path, 0) + 1
        return forward(module, *args, **kwargs)


def _rehearse(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rehearsal:
    start = RandomState()
    counter = _Counter({id(module): name for name, module in model.named_modules()})
    watches = [(name, watch_module(name, module)) for name, module in model.named_modules()]
    hooks = torch.autograd.graph.saved_tensors_hooks(drop, gone)
    with unwritten(model, args, kwargs), hooks, calling(counter):
        plain_forward(model)(*args, **kwargs)
        changed = tuple(name for name, watch in watches if any(watch.changes()))
        python, end = not start.python_is_same(), RandomState()
    uncalled = any(
        neighbour(path, module, model, counter.counts) is not None
        for path, module in model.named_modules()
        if path and path not in counter.counts
    )
    return Rehearsal(
        start=start,
        end=end,
        counts=counter.counts,
        changed=changed,
        python=python,
        uncalled=uncalled,
    )


def neighbour(
    path: str, module: nn.Module, model: nn.Module, counts: Mapping[str, int]
) -> str | None:
    """Name the nearest module in the same place of another layer that was called."""
    parts = path.split(".")
    found: list[tuple[int, str]] = []
    for depth, part in enumerate(parts):
        if not part.isdigit():
            continue
        head = parts[:depth]
        for name in model.get_submodule(".".join(head))._modules:
            other = ".".join((*head, name, *parts[depth + 1 :]))
            if not name.isdigit() or other not in counts:
                continue
            if type(model.get_submodule(other)) is type(module):
                found.append((abs(int(name) - int(part)), other))
    return min(found)[1] if found else None


@_disable_dynamo
def plain_forward(model: nn.Module) -> Callable[..., Any]:
    """Give the forward of the class that the root had before it was optimized."""
    # Inherited by a class that was made on top of ours (FSDP's).
    original = getattr(type(model), "_autockpt_original", type(model))
    forward: Callable[..., Any] = original.forward.__get__(model)
    return forward
