"""Regions are watched: a recomputation that is not the forward's is an error, never a gradient.

``checkpoint`` itself watches the tensors that a region is given and how many it saves, of which
shapes. What a region looks up on the live module, parameters and buffers, is watched here by
version and identity, and errors are told in the words of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from autockpt.capture.calls import version
from autockpt.errors import RecomputationError
from autockpt.regions.recomputation import Explained
from autockpt.regions.statistics import Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a region besides its code.

    Attributes
    ----------
    name : str
        Of its function.
    place : str
        Its modules and source lines, for errors.
    reads : tuple of str
        Parameters and buffers that it looks up on the module.
    read : callable
        From the module to those tensors, in the same order.
    writes_statistics : bool
        Whether its replay works on clones of running statistics.
    """

    name: str
    place: str
    reads: tuple[str, ...]
    read: Callable[[nn.Module], tuple[torch.Tensor, ...]]
    writes_statistics: bool


def guarded(region: Callable[..., Any], module: nn.Module) -> dict[str, Any]:
    """Give the arguments of ``checkpoint`` that watch a region of the emitted code.

    A compiler runs no region twice, it copies ops and writes at the end: nothing to do.
    """
    if torch.compiler.is_compiling() or _is_traced():
        return {}
    facts: Facts = region.facts  # type: ignore[attr-defined]
    # While someone looks for differences with torch's own means, which allow no contexts.
    if torch_checkpoint._checkpoint_debug_enabled and not facts.writes_statistics:
        return {}
    return {"context_fn": functools.partial(_contexts, facts, module)}


def _is_traced() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _contexts(
    facts: Facts, module: nn.Module
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    unchanged = Unchanged(facts, module)
    return Explained(f"{unchanged.region},", CAUSES), unchanged


CAUSES = (
    "Usual causes: a custom autograd.Function or custom op whose result depends on Python state "
    "or on time, an op without a deterministic implementation, a global that was changed between "
    "forward and backward. Move backward closer to its forward, or take that op's module out of "
    "the model that is optimized."
)


class Unchanged:
    """Around a recomputation: the module's tensors are those of the forward, and unchanged.

    Autograd saves tensors, so a weight that was replaced since (``functional_call``,
    ``load_state_dict(assign=True)``) is the old one in backward, and so it is here.
    """

    __slots__ = ("_facts", "_module", "_replaced", "_then")

    def __init__(self, facts: Facts, module: nn.Module) -> None:
        self._facts = facts
        self._module = module
        self._then = [(t, version(t), _address(t)) for t in facts.read(module)]
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Give what the region reads on the module."""
        return [tensor for tensor, _, _ in self._then]

    @property
    def region(self) -> str:
        """Name the region, as a sentence begins."""
        return f"Region {self._facts.name}, {self._facts.place}"

    def __enter__(self) -> None:
        for name, (tensor, number, address) in zip(self._facts.reads, self._then, strict=True):
            if version(tensor) != number:
                raise _changed(
                    self._facts,
                    name,
                    f"has been modified by an inplace operation (it is at version "
                    f"{version(tensor)}, expected version {number})",
                )
            if _address(tensor) != address:
                raise _changed(self._facts, name, "was given other .data")
        if not self._holds():
            self._put_back()
        if self._facts.writes_statistics:
            Replay.enter()

    def __exit__(self, *_: object) -> None:
        if self._facts.writes_statistics:
            Replay.leave()
        while self._replaced:
            table, name, now = self._replaced.pop()
            table[name] = now

    def _holds(self) -> bool:
        try:
            now = self._facts.read(self._module)
        except (AttributeError, LookupError, TypeError):  # a layer is gone, or another one
            return False
        return all(a is b for a, (b, _, _) in zip(now, self._then, strict=True))

    def _put_back(self) -> None:
        """Put the tensors of the forward in place of those that are there now."""
        places = [_place_on(self._module, target) for target in self._facts.reads]
        for target, place in zip(self._facts.reads, places, strict=True):
            if place is None:
                raise _changed(self._facts, target, "was taken out of the model")
        for (table, name), (tensor, _, _) in zip(filter(None, places), self._then, strict=True):
            self._replaced.append((table, name, table[name]))
            table[name] = tensor


def _address(tensor: torch.Tensor) -> int:
    """Tell where a tensor's bytes are: ``.data = ...`` moves them behind the version's back."""
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _place_on(module: nn.Module, target: str) -> tuple[dict[str, Any], str] | None:
    """Find the table that holds a parameter or buffer."""
    path, _, name = target.rpartition(".")
    try:
        owner: Any = module.get_submodule(path)
    except AttributeError:
        return None
    tables = (owner._parameters, owner._buffers)
    return next(((table, name) for table in tables if name in table), None)


def _changed(facts: Facts, name: str, what: str) -> RecomputationError:
    return RecomputationError(
        f"{name} {what} between forward and backward, and region {facts.name}, {facts.place}, "
        f"needs it as it was to run again. Call backward before the weights change "
        f"(optimizer.step(), load_state_dict, an update in a hook), or run forward again."
    )
