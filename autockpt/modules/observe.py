"""Look at a forward as it runs: the calls of modules, and the torch calls in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module_globals

from autockpt.capture import Ambient, Capture, Template
from autockpt.capture.finish import finish
from autockpt.capture.lives import add_holds
from autockpt.capture.losses import check_loss, default_loss
from autockpt.capture.mode import Recorder
from autockpt.capture.patches import patched
from autockpt.capture.paths import is_atom
from autockpt.capture.refusals import drop, gone, refuse_modes, refuse_modules
from autockpt.capture.restore import RandomState, Trace
from autockpt.capture.stream import Stream
from autockpt.capture.watch import Watch
from autockpt.modules.key import ModuleKey
from autockpt.modules.kinds import Trail
from autockpt.modules.parts import Forward, calling
from autockpt.modules.rehearsal import Rehearsal, fullest, plain_forward
from autockpt.modules.sharding import sharded_inside
from autockpt.modules.state import watch_module, watch_values
from autockpt.modules.unwritten import unwritten

Loss = Callable[[Any], torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of a submodule with grad: without it nothing is held, and nothing runs again.

    Attributes
    ----------
    path : str
        Of the module.
    number : int
        How often it was called before.
    modules : tuple of str
        Modules whose Python attributes it changed.
    arguments : bool
        Whether it changed objects that it was given.
    """

    path: str
    number: int
    modules: tuple[str, ...] = ()
    arguments: bool = False

    @property
    def name(self) -> str:
        """As in ``Span.name``."""
        return f"{self.path}:{self.number}" if self.number else self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What was seen of one forward.

    Attributes
    ----------
    capture : Capture
        Its torch calls; nothing that can be run in the model's place.
    closures : mapping
        Tensors that are neither the model's nor the batch's.
    calls : tuple of Call
        Of submodules, in order; ``meta["calls"]`` of a node has their indices.
    forbidden : mapping
        From the index of a call that must not run again to the reason.
    counts : mapping
        How often each module was called with grad.
    called : frozenset of str
        Modules that were called one way or the other.
    trail : Trail
        What was called in which order.
    python : bool
        Whether it drew from python's or numpy's generators.
    start : RandomState
        The random states that it found: those under which most modules were called.
    uncalled : bool
        Whether a module was not called with grad that has a neighbour in a list that was.
    """

    capture: Capture
    closures: Mapping[str, torch.Tensor]
    calls: tuple[Call, ...]
    forbidden: Mapping[int, str]
    counts: Mapping[str, int]
    called: frozenset[str]
    trail: Trail
    python: bool
    start: RandomState
    uncalled: bool


class _Observer:
    """The caller while a forward is looked at."""

    def __init__(self, root: nn.Module, stream: Stream, watched: tuple[str, ...]) -> None:
        self.names = {id(module): name for name, module in root.named_modules()}
        self.calls: list[Call] = []
        self.counts: dict[str, int] = {}
        self.called: set[str] = set()
        self.trail = Trail()
        self._stream = stream
        self._watched = [(name, root.get_submodule(name)) for name in watched]

    def call(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a submodule and write down that it was called, and what it changed."""
        path = self.names.get(id(module))
        if path is None:
            return forward(module, *args, **kwargs)
        self.called.add(path)
        if not torch.is_grad_enabled():
            self.trail.without_grad(path)
            return forward(module, *args, **kwargs)
        call = Call(path=path, number=self.counts.get(path, 0))
        self.counts[path] = call.number + 1
        index = len(self.calls)
        self.calls.append(call)
        before = [(name, watch_module(name, other)) for name, other in self._watched]
        arguments = _watch_arguments(args, kwargs)
        self._stream.calls.append(index)
        self.trail.enter(path, call.number, args, kwargs)
        try:
            return forward(module, *args, **kwargs)
        finally:
            self.trail.leave()
            self._stream.calls.pop()
            call.modules = tuple(name for name, watch in before if any(watch.changes()))
            call.arguments = arguments is not None and any(arguments.changes())


def _watch_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch | None:
    """Look at lists and dicts among arguments, and at objects that are no plain values."""
    given = (*args, *kwargs.values())
    if all(isinstance(value, torch.Tensor) or is_atom(value) for value in given):
        return None
    return watch_values(given)


def observe(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss | None = None,
    start: RandomState | None = None,
) -> Observation:
    """Run the model's forward and loss once and write down what happened.

    Parameters
    ----------
    model : nn.Module
        Its submodules are of the classes of ``parts``.
    args, kwargs
        The batch.
    loss : callable, optional
        As for ``optimize``.

    Raises
    ------
    CaptureError
        If the forward does what no recomputation could stand: runs autograd, calls
        ``checkpoint`` itself.

    Notes
    -----
    Needs the memory of a forward without grad, and twice its time, more where modules are called
    or not by a draw: then forwards are run to find one that calls most of them. Leaves no trace.
    """
    refuse_modules(model)
    refuse_modes()
    with torch.enable_grad(), drawn(start):
        rehearsal = fullest(model, args, kwargs, alone=start is not None)
    with torch.enable_grad(), drawn(rehearsal.start), unwritten(model, args, kwargs) as trace:
        return _observed(model, args, kwargs, loss, trace, rehearsal)


@contextmanager
def drawn(start: RandomState | None) -> Iterator[None]:
    """Let random draws be those that follow a state, and put the states back afterwards."""
    if start is None:
        yield
        return
    here = RandomState()
    start.restore()
    try:
        yield
    finally:
        here.restore()


def _observed(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss | None,
    trace: Trace,
    rehearsal: Rehearsal,
) -> Observation:
    stream = Stream(model, args, kwargs, lenient=True)
    ambient = Ambient.current(stream.device_types)
    key = ModuleKey.take(model, args, kwargs)
    recorder = Recorder(stream, trace)
    observer = _Observer(model, stream, rehearsal.changed)
    hooks = torch.autograd.graph.saved_tensors_hooks(drop, gone)
    with patched(recorder), recorder, hooks:
        with calling(observer):
            output = plain_forward(model)(*args, **kwargs)
        stream.returned = type(output).__name__
        recorder.paused += 1
        tensors = _tensors(output)
        nodes = tuple(map(stream.node_of, tensors))
        recorder.paused -= 1
        stream.stage = "loss"
        found = default_loss(output, tensors) if loss is None else loss(output)
        recorder.paused += 1
        scalar = check_loss(found)
    graph, signature = finish(stream.graph, (nodes, stream.node_of(scalar)), model, in_order=True)
    add_holds(graph, stream.deaths)
    capture = Capture(
        graph=graph,
        inputs=stream.inputs,
        outputs=None,
        key=key,
        ambient=ambient,
        signature=signature,
        notes=tuple(stream.notes),
        writes=trace.written(model),
    )
    return Observation(
        capture=capture,
        closures=stream.closures,
        calls=tuple(observer.calls),
        forbidden={**_hooked(model, observer), **_gathering(model, observer), **stream.forbidden},
        counts=observer.counts,
        called=frozenset(observer.called),
        trail=observer.trail,
        python=rehearsal.python,
        start=rehearsal.start,
        uncalled=rehearsal.uncalled,
    )


def _tensors(output: Any) -> list[torch.Tensor]:
    return list(Template.describe(output)[1])


def _gathering(model: nn.Module, observer: _Observer) -> dict[int, str]:
    reasons = sharded_inside(model)
    return {i: reasons[c.path] for i, c in enumerate(observer.calls) if c.path in reasons}


_HARMLESS = (
    "torch.distributed.",
    "transformers.utils.output_capturing",
    "autockpt.modules.sharding",
)


def _hooked(model: nn.Module, observer: _Observer) -> dict[int, str]:
    """Calls inside which hooks of the user would run a second time."""
    hooked = {name for name, module in model.named_modules() if name and _has_hooks(module)}
    everywhere = any(_module_globals.__dict__[name] for name in _GLOBAL)
    found: dict[int, str] = {}
    for index, call in enumerate(observer.calls):
        inside = f"{call.path}."
        if everywhere or any(name.startswith(inside) for name in hooked):
            found[index] = "forward hooks in it would run twice"
    return found


_GLOBAL = ("_global_forward_hooks", "_global_forward_pre_hooks")


def _has_hooks(module: nn.Module) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not _origin(hook).startswith(_HARMLESS) for hook in hooks)


def _origin(hook: Any) -> str:
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", ""))
