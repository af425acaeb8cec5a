"""Regions of emitted code: run once with nothing saved, and again when backward asks.

The semantics are those of ``torch.utils.checkpoint`` without reentrance: saved tensors are packed
as tickets, and the first one that is unpacked in a backward pass runs the region again, up to the
last tensor that it saved. Only what the regions of an emitted forward need is here, which takes a
third of the Python. Torch's own function runs them where its tools look on: under a compiler, and
with its debug mode.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils import checkpoint as torch_checkpoint

from autockpt.errors import RecomputationError
from autockpt.regions.guarded import CAUSES, Facts, Unchanged, guarded
from autockpt.regions.keeping import Keeper
from autockpt.regions.recomputation import differs, note_region
from autockpt.regions.surroundings import Inputs, Modes, Random

__all__ = ["checkpointed"]

_AUTOGRAD: Any = torch._C._autograd
# Of a GraphExecGroup, whose backward passes share their recomputations.
_group: Any = getattr(torch._C, "_get_graph_exec_group", lambda: None)
_Region = Callable[..., Any]
_Form = tuple[torch.Size, torch.dtype, torch.device]


def checkpointed(region: _Region, module: nn.Module, *arguments: Any, draws: bool | str) -> Any:
    """Call a region, ``region(module, *arguments)``, such that backward runs it again.

    Parameters
    ----------
    region : callable
        With what is known of it in ``region.facts``.
    module : nn.Module
        Whose parameters it reads.
    *arguments
        Tensors, a ``keeper()``, a ``remade(...)``.
    draws : bool or "kept"
        Whether a recomputation draws random numbers: the generators are put back for it. With
        "kept" only ops draw that are kept.

    Raises
    ------
    RecomputationError
        In backward: the region does not save what it saved in forward.
    """
    if torch.compiler.is_compiling() or _looked_on():
        plain = [None if isinstance(a, Keeper) else a for a in arguments]
        return torch_checkpoint.checkpoint(
            region,
            module,
            *plain,
            use_reentrant=False,
            preserve_rng_state=bool(draws),
            **guarded(region, module),
        )
    return _run(region, module, arguments, draws is True)


def _looked_on() -> bool:
    """Tell whether a tracer or torch's own search for differences wants torch's own function."""
    return (
        torch_checkpoint._checkpoint_debug_enabled is not None
        or torch_checkpoint._enable_checkpoint_early_stop is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )


@_disable_dynamo
def _run(region: _Region, module: nn.Module, arguments: Sequence[Any], draws: bool) -> Any:
    if not torch.is_grad_enabled():
        return region(module, *arguments)
    call = _Call(region, module, arguments, draws)
    _AUTOGRAD._push_saved_tensors_default_hooks(call.pack, call.unpack)
    try:
        return region(module, *arguments)
    finally:
        _AUTOGRAD._pop_saved_tensors_default_hooks()


class _Ticket:
    """Stands for a saved tensor; dies with autograd's need of it.

    ``made`` has the tensor again from a recomputation until it is asked for, by backward pass.
    """

    __slots__ = ("__weakref__", "made")

    def __init__(self) -> None:
        self.made: dict[object, torch.Tensor] = {}


class _Done(Exception):
    """The last tensor has been made again."""


class _Call:
    """One call of a region."""

    __slots__ = (
        *("_modes", "_forms", "_inputs", "_keeper", "_module", "_random", "_ran", "_region"),
        *("_tickets", "_unchanged"),
    )

    def __init__(
        self, region: _Region, module: nn.Module, arguments: Sequence[Any], draws: bool
    ) -> None:
        facts: Facts = region.facts  # type: ignore[attr-defined]
        self._region = region
        self._module = module
        self._inputs = Inputs(arguments)
        self._keeper = next((a for a in arguments if isinstance(a, Keeper)), None)
        self._unchanged = Unchanged(facts, module)
        # A region may have no argument on the device that it works on, only weights.
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)] + self._unchanged.tensors
        self._modes = Modes(tensors)
        self._random = Random(tensors) if draws else None
        self._tickets: list[weakref.ref[_Ticket]] = []
        self._forms: list[_Form] = []
        # Backward passes for which the region has run again.
        self._ran: set[object] = set()

    def pack(self, tensor: torch.Tensor) -> _Ticket:
        """Note what is saved, in forward."""
        keeper = self._keeper
        if keeper is not None and keeper.running is not None:
            keeper.running.note(tensor)
        ticket = _Ticket()
        self._tickets.append(weakref.ref(ticket))
        self._forms.append((tensor.shape, tensor.dtype, tensor.device))
        return ticket

    def unpack(self, ticket: _Ticket) -> torch.Tensor:
        """Give a saved tensor, in backward."""
        key: object = _group()
        if key is None:
            key = torch._C._current_graph_task_id()
            if key == -1:  # outside backward: somebody looks into the graph
                key = object()
        if key not in ticket.made:
            self._replay(key, ticket)
        return ticket.made.pop(key)

    def _replay(self, key: object, wanted: _Ticket) -> None:
        # What has been given before in this pass, and is asked for once more, is made alone.
        replay = _Replay(self._tickets, key, wanted if key in self._ran else None)
        arguments = self._inputs.unpacked()
        random = contextlib.nullcontext() if self._random is None else self._random.again()
        try:
            with random, self._modes.again(), self._unchanged, torch.enable_grad():
                self._run_again(replay, arguments)
            self._check(replay)
        except BaseException as error:
            # The graph may live on, and nobody will ask for the rest.
            replay.take_back()
            if not isinstance(error, RecomputationError):
                note_region(error, self._unchanged.region)
            raise
        self._ran.add(key)

    def _run_again(self, replay: _Replay, arguments: Sequence[Any]) -> None:
        keeper = self._keeper
        outer = None if keeper is None else keeper.hand_to(replay.pack)
        _AUTOGRAD._push_saved_tensors_default_hooks(replay.pack, _as_it_is)
        try:
            _again(self._region, self._module, arguments)
        except _Done:
            pass
        finally:
            _AUTOGRAD._pop_saved_tensors_default_hooks()
            if keeper is not None:
                keeper.hand_to(outer)

    def _check(self, replay: _Replay) -> None:
        then, now = len(self._tickets), replay.count
        if now < then:
            raise self._differs(f"It saved {then} tensors in forward, and {now} in backward.")
        differing = [
            f"tensor {number}: {_described(form)} in forward, {_described(again)} in backward"
            for number, again in replay.forms
            if again != (form := self._forms[number])
        ]
        if differing:
            raise self._differs(f"It saved other tensors: {'; '.join(differing)}.")

    def _differs(self, how: str) -> RecomputationError:
        return differs(f"{self._unchanged.region},", how, CAUSES)


class _Replay:
    """One recomputation, in which saved tensors go to their tickets."""

    __slots__ = ("_key", "_only", "_tickets", "count", "forms")

    def __init__(
        self, tickets: Sequence[weakref.ref[_Ticket]], key: object, only: _Ticket | None
    ) -> None:
        self._tickets = tickets
        self._key = key
        self._only = only
        self.count = 0
        self.forms: list[tuple[int, _Form]] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hand a tensor over if autograd still wants it."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        number = self.count
        self.count = number + 1
        ticket = self._tickets[number]()
        if ticket is not None and (self._only is None or ticket is self._only):
            self.forms.append((number, (tensor.shape, tensor.dtype, tensor.device)))
            ticket.made[self._key] = tensor
        if self.count == len(self._tickets):
            raise _Done
        return tensor

    def take_back(self) -> None:
        """Let go of what was handed over."""
        for number, _ in self.forms:
            ticket = self._tickets[number]()
            if ticket is not None:
                ticket.made.pop(self._key, None)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# A frame of its own without a closure, and none that Dynamo looks at if someone compiles the loop.
@_disable_dynamo
def _again(region: _Region, module: nn.Module, arguments: Sequence[Any]) -> None:
    region(module, *arguments)


def _described(form: _Form) -> str:
    shape, dtype, device = form
    return f"{tuple(shape)} of {dtype} on {device}"
