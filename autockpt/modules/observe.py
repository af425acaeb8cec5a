"""Look at a forward as it runs: the calls of modules, and the torch calls in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module_globals

from autockpt.capture import Ambient, Capture, Template
from autockpt.capture.finish import finish
from autockpt.capture.losses import check_loss, default_loss
from autockpt.capture.mode import Recorder
from autockpt.capture.patches import patched
from autockpt.capture.paths import is_atom
from autockpt.capture.refusals import drop, gone, refuse_modes, refuse_modules
from autockpt.capture.restore import RandomState, Trace, untraced
from autockpt.capture.stream import Stream
from autockpt.capture.watch import Watch
from autockpt.modules.key import ModuleKey
from autockpt.modules.parts import Forward, calling

Loss = Callable[[Any], torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of a submodule.

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
        How often each module was called.
    python : bool
        Whether it drew from python's or numpy's generators.
    """

    capture: Capture
    closures: Mapping[str, torch.Tensor]
    calls: tuple[Call, ...]
    forbidden: Mapping[int, str]
    counts: Mapping[str, int]
    python: bool


class _Observer:
    """The caller while a forward is looked at."""

    def __init__(self, root: nn.Module, stream: Stream, watched: tuple[str, ...]) -> None:
        self.names = {id(module): name for name, module in root.named_modules()}
        self.calls: list[Call] = []
        self.counts: dict[str, int] = {}
        self._stream = stream
        self._watched = [(name, root.get_submodule(name)) for name in watched]

    def call(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a submodule and write down that it was called, and what it changed."""
        path = self.names.get(id(module))
        if path is None:
            return forward(module, *args, **kwargs)
        call = Call(path=path, number=self.counts.get(path, 0))
        self.counts[path] = call.number + 1
        index = len(self.calls)
        self.calls.append(call)
        before = [(name, _watch(name, other)) for name, other in self._watched]
        arguments = _watch_arguments(args, kwargs)
        self._stream.calls.append(index)
        try:
            return forward(module, *args, **kwargs)
        finally:
            self._stream.calls.pop()
            call.modules = tuple(name for name, watch in before if any(watch.changes()))
            call.arguments = arguments is not None and any(arguments.changes())


def _watch(name: str, module: nn.Module) -> Watch:
    watch = Watch()
    watch.visit_module(name, module)
    return watch


def _watch_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch | None:
    """Look at lists and dicts among arguments, and at objects that are no plain values."""
    given = (*args, *kwargs.values())
    if all(isinstance(value, torch.Tensor) or is_atom(value) for value in given):
        return None
    watch = Watch()
    watch.visit("the arguments", given, 0)
    return watch


def observe(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss | None = None
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
    Needs the memory of a forward without grad, twice its time, and leaves no trace.
    """
    refuse_modules(model)
    refuse_modes()
    with untraced(model, args, kwargs), torch.enable_grad():
        changed, python = _changes(model, args, kwargs)
    with untraced(model, args, kwargs) as trace, torch.enable_grad():
        return _observed(model, args, kwargs, loss, trace, changed, python)


def _changes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[str, ...], bool]:
    """Name the modules whose Python attributes a forward changes; say whether Python draws."""
    watches = [(name, _watch(name, module)) for name, module in model.named_modules()]
    state = RandomState()
    with torch.autograd.graph.saved_tensors_hooks(drop, gone):
        plain_forward(model)(*args, **kwargs)
    changed = tuple(name for name, watch in watches if any(watch.changes()))
    return changed, not state.python_is_same()


def plain_forward(model: nn.Module) -> Callable[..., Any]:
    """Give the forward of the class that the root had before it was optimized."""
    # Inherited by a class that was made on top of ours (FSDP's).
    original = getattr(type(model), "_autockpt_original", type(model))
    forward: Callable[..., Any] = original.forward.__get__(model)
    return forward


def _observed(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss | None,
    trace: Trace,
    changed: tuple[str, ...],
    python: bool,
) -> Observation:
    stream = Stream(model, args, kwargs, lenient=True)
    ambient = Ambient.current(stream.device_types)
    key = ModuleKey.take(model, args, kwargs)
    recorder = Recorder(stream, trace)
    observer = _Observer(model, stream, changed)
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
        forbidden={**_hooked(model, observer), **stream.forbidden},
        counts=observer.counts,
        python=python,
    )


def _tensors(output: Any) -> list[torch.Tensor]:
    return list(Template.describe(output)[1])


_HARMLESS = ("torch.distributed.", "transformers.utils.output_capturing")


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
