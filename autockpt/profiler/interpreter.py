"""Runs a captured graph once for real, op by op, and rehearses each distinct op on the way.

Values are dropped after their last use and nothing is saved for backward, so a profile needs
the memory of a forward without grad plus that of its largest op: a model whose plain step does
not fit is still profiled. On ``meta`` tensors the same pass needs no memory at all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autockpt.capture import Capture, TensorMeta
from autockpt.capture.guards import expect
from autockpt.capture.lives import hold
from autockpt.capture.mask_parts import SHOWN
from autockpt.capture.paths import read_path
from autockpt.capture.restore import Trace, untraced
from autockpt.errors import ProfileError
from autockpt.meters import Meter, NullMeter, collector_off, meter
from autockpt.profiler.cost import CostChoice, OpWork, cost_model, cost_on
from autockpt.profiler.facts import External, OpFacts, Profile
from autockpt.profiler.forms import Forms, forms_of, layouts_of
from autockpt.profiler.layouts import Handed, Layouts, gradient_layouts
from autockpt.profiler.overhead import region_ns
from autockpt.profiler.rehearse import Rehearsal, rehearse
from autockpt.profiler.subject import Layout, Subject, written_base
from autockpt.profiler.tensors import distinct, storage_bytes, storage_of, tensors_in
from autockpt.profiler.timed import Timer

_PASSES = 4


def profile(
    capture: Capture,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    closures: Mapping[str, torch.Tensor] | None = None,
    forms: Forms | None = None,
    cost: CostChoice = "time",
) -> Profile:
    """Measure every distinct op of a captured step.

    Parameters
    ----------
    capture : Capture
    model : nn.Module
        The module that was captured; its buffers and the random states are put back.
    args, kwargs
        The batch that was captured.
    closures : mapping, optional
        ``Recorded.closures``: tensors that the loss outside the model holds.
    forms : dict, optional
        ``Profile.gradient_forms`` of the same calls on other shapes: spares a pass over the step.
    cost : {"time", "roofline"} or callable
        What an op costs, see ``autockpt.profiler.cost``.

    Raises
    ------
    ProfileError
        If an op cannot be run apart.

    Notes
    -----
    One forward without grad, plus each distinct op (function, layouts, constants, ambient
    modes) forward and backward two times; with ``cost="time"`` five times, and up to three
    more to where its last tensor is packed. Where gradients turn out to lie otherwise than was
    taken to be the case, another forward, and again the ops that they reach.
    """
    closures = closures or {}
    inputs = capture.inputs.tensors(args, kwargs)
    device = device_of(model, inputs)
    cost = cost_on(cost, device.type)
    timer = Timer(device) if cost == "time" else None
    known: dict[Any, Rehearsal] = {}
    seen: dict[fx.Node, Handed] = {}
    if forms is None:
        layouts = gradient_layouts(capture, model, inputs, closures, seen)
    else:
        layouts = Layouts(layouts_of(capture, forms))
    for _ in range(_PASSES):
        watch = meter(device)
        with untraced(model, args, kwargs) as trace:
            runner = _Runner(capture, model, watch, cost_model(cost), trace, timer)
            runner.closures = closures
            runner.layouts = layouts.arriving
            runner.known = known
            with collector_off(), watch:
                runner.run(*inputs)
        facts, known = _finished(runner, watch)
        mistaken = layouts.mistaken(facts)
        if not mistaken:
            break
        seen.update(mistaken)
        corrected = gradient_layouts(capture, model, inputs, closures, seen)
        if corrected.arriving == layouts.arriving:
            break
        layouts = corrected
    return Profile(
        facts=facts,
        externals=runner.externals,
        unpacked=runner.unpacked,
        gradient_forms=forms_of(capture, layouts.arriving) if forms is None else forms,
        distinct_ops=len(known),
        device_type=device.type,
        region_cost=region_ns(device.type) if timer is not None else 0,
        **fixed_bytes(model, inputs),
    )


def _finished(runner: _Runner, watch: Meter) -> tuple[dict[fx.Node, OpFacts], dict[Any, Rehearsal]]:
    """Complete what a pass has found, now that the meter is closed."""
    found: dict[int, OpFacts] = {}
    for rehearsal in (*runner.known.values(), *runner.rehearsals.values()):
        if id(rehearsal) not in found:
            found[id(rehearsal)] = rehearsal.finish(watch)
    known = {
        key: Rehearsal(facts=found[id(rehearsal)], name=rehearsal.name)
        for key, rehearsal in runner.known.items()
    }
    return {node: found[id(of)] for node, of in runner.rehearsals.items()}, known


def device_of(model: nn.Module, tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device that a step runs on: of the first parameter, else of the first tensor."""
    for tensor in (*model.parameters(), *model.buffers(), *tensors):
        return tensor.device
    return torch.device("cpu")


def fixed_bytes(model: nn.Module, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """Bytes at the start of a step whose gradients are resident, each storage once."""
    seen: set[int] = set()

    def count(tensors: Sequence[torch.Tensor]) -> int:
        total = 0
        for tensor in tensors:
            if storage_of(tensor) not in seen:
                seen.add(storage_of(tensor))
                total += storage_bytes(tensor)
        return total

    trained = [p for p in (*model.parameters(), *distinct(inputs)) if p.requires_grad and p.is_leaf]
    return {
        "parameter_bytes": count(list(model.parameters())),
        "buffer_bytes": count(list(model.buffers())),
        "batch_bytes": count(list(inputs)),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in trained),
    }


class _Runner(fx.Interpreter):
    """The interpreter: ``rehearsals`` and ``externals`` are what it finds."""

    def __init__(
        self,
        capture: Capture,
        model: nn.Module,
        watch: Meter,
        cost: Callable[[OpWork], int],
        trace: Trace,
        timer: Timer | None,
    ) -> None:
        super().__init__(model, garbage_collect_values=True, graph=capture.graph)
        # Errors name the op and its source line themselves.
        self.extra_traceback = False
        self.rehearsals: dict[fx.Node, Rehearsal] = {}
        self.externals: dict[fx.Node, External] = {}
        self.known: dict[Any, Rehearsal] = {}
        self.unpacked: dict[fx.Node, tuple[fx.Node, int]] = {}
        self.closures: Mapping[str, torch.Tensor] = {}
        self.layouts: dict[fx.Node, tuple[Layout, ...]] = {}
        self._model = model
        self._base = capture.ambient
        self._watch = watch
        self._cost = cost
        self._trace = trace
        self._timer = timer
        self._objects: dict[Hashable, int] = {}
        self._storages: dict[Hashable, int] = {}
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._buffers = {id(buffer) for buffer in model.buffers()}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; look at it apart if it is the first of its kind."""
        if n.op in ("placeholder", "get_attr"):
            value = super().run_node(n) if n.op == "placeholder" else self._read(str(n.target))
            self.externals[n] = self._external(n, value)
            return value
        if n.op == "output":
            return None
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is hold:
            self.rehearsals[n] = Rehearsal(facts=OpFacts(), name=n.name)
            return None
        if n.target is expect:
            self.rehearsals[n] = Rehearsal(facts=OpFacts(), name=n.name)
            return args[1]
        if n.target is operator.getitem and isinstance(args[0], tuple | list):
            return self._unpack(n, args[0][args[1]])
        return self._run_op(n, args, kwargs)

    def _read(self, target: str) -> Any:
        held = self.closures.get(target)
        return held if held is not None else read_path(self._model, target)

    def _identity(self, node: fx.Node, tensor: torch.Tensor) -> tuple[Hashable, Hashable]:
        """Tell tensors and storages apart, those too that are made whenever they are read."""
        if node.op == "get_attr" and node.target in self.closures:
            return str(node.target), str(node.target)
        return id(tensor), storage_of(tensor)

    def _unpack(self, node: fx.Node, value: Any) -> Any:
        self.rehearsals[node] = Rehearsal(facts=OpFacts(), name=node.name)
        parent = node.args[0]
        assert isinstance(parent, fx.Node)
        root, _ = self.unpacked.get(parent, (parent, 0))
        index = -1
        if isinstance(value, torch.Tensor):
            index = next(i for i, t in enumerate(tensors_in(self.env[root])) if t is value)
        self.unpacked[node] = (root, index)
        return value

    def _run_op(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _callable(node)
        ambient = node.meta["ambient"]
        with ambient.enter():
            key = _distinct_key(node, args, kwargs), self.layouts.get(node, ())
            known = self.known.get(key)
            if known is None:
                try:
                    known = self._rehearse(node, call, args, kwargs)
                except ProfileError:
                    raise
                except Exception as error:
                    said = f"{_first_sentence(error)} {_advice(args, kwargs)}"
                    raise ProfileError(
                        f"'{target_name(node)}' ({node.meta['module']}, {node.meta['source']}) "
                        f"could not be measured apart: {said}"
                    ) from error
                self.known[key] = known
            self.rehearsals[node] = known
            for argument in node.meta.get("writes", ()):
                self._trace.before_write(self.env[argument])
            with torch.no_grad():
                return call(*args, **kwargs)

    def _rehearse(
        self, node: fx.Node, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Rehearsal:
        nodes, tensors = _argument_nodes(node), tensors_in((args, kwargs))
        wants = {
            id(tensor)
            for argument, tensor in zip(nodes, tensors, strict=True)
            if argument in node.meta["wants"]
        }
        written = set(node.meta.get("writes", ()))
        subject = Subject(
            name=f"{len(self.known)}",
            target=target_name(node),
            call=call,
            args=args,
            kwargs=kwargs,
            differentiable=frozenset(wants),
            written=frozenset(
                id(tensor)
                for argument, tensor in zip(nodes, tensors, strict=True)
                if argument in written
            ),
            external=frozenset(
                id(tensor)
                for argument, tensor in zip(nodes, tensors, strict=True)
                if argument in self.externals
            ),
            layouts=self.layouts.get(node, ()),
        )
        measured = not isinstance(self._watch, NullMeter)
        return rehearse(subject, self._watch, self._cost, timer=self._timer, measured=measured)

    def _external(self, node: fx.Node, tensor: torch.Tensor) -> External:
        kind: Literal["parameter", "buffer", "attribute", "batch"] = "attribute"
        if node.op == "placeholder":
            kind = "batch"
        elif id(tensor) in self._parameters or node.meta.get("kind") == "parameter":
            kind = "parameter"
        elif id(tensor) in self._buffers:
            kind = "buffer"
        wanted = tensor.requires_grad
        same, allocated = self._identity(node, tensor)
        return External(
            tensor=self._objects.setdefault(same, len(self._objects)),
            storage=self._storages.setdefault(allocated, len(self._storages)),
            storage_bytes=storage_bytes(tensor),
            gradient_bytes=tensor.numel() * tensor.element_size() if wanted else 0,
            kind=kind,
        )


def _first_sentence(error: Exception) -> str:
    # torch lists all its backends behind it.
    return str(error).partition("\n")[0].partition(". ")[0].removesuffix(".") + "."


def _advice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What to do about an op that cannot be measured."""
    sparse = {t.layout for t in tensors_in((args, kwargs)) if t.layout is not torch.strided}
    if sparse:
        names = ", ".join(sorted(map(str, sparse)))
        return f"It is given a sparse tensor ({names}): leave that part out of the model."
    return "Leave that part out of the module that is optimized."


# Where torch keeps its builtins, and the names people import them by.
_PUBLIC = {
    "torch._C._nn": "torch.nn.functional",
    "torch._C._VariableFunctions": "torch",
    "_operator": "operator",
}


def target_name(node: fx.Node) -> str:
    """A name a reader knows: ``torch.nn.functional.linear``, ``Tensor.view``."""
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    target: Any = node.target
    shown = next((name for own, name in SHOWN.items() if own is target), None)
    if shown is not None:
        return shown
    name = getattr(target, "__name__", str(target))
    if "_VariableFunctions" in getattr(target, "__qualname__", ""):
        return f"torch.{name}"
    module = getattr(target, "__module__", None) or "torch"
    if module in _PUBLIC:
        return f"{_PUBLIC[module]}.{name}"
    return f"{module}.{getattr(target, '__qualname__', name)}"


def _callable(node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_method":
        name = str(node.target)
        return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)
    assert callable(node.target)
    return node.target


def _argument_nodes(node: fx.Node) -> list[fx.Node]:
    """The tensor nodes among the arguments in order of appearance, repeats included."""
    found: list[fx.Node] = []

    def add(argument: fx.Node) -> fx.Node:
        if argument.meta["tensors"]:
            found.append(argument)
        return argument

    fx.map_arg((node.args, node.kwargs), add)
    return found


def _distinct_key(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What two nodes must share to be the same op: function, layouts, constants, modes.

    That their gradients arrive in the same layouts comes on top.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    nodes = iter(_argument_nodes(node))
    storages: dict[int, int] = {}
    objects: dict[int, int] = {}
    parts: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            parts.append((type(leaf), repr(leaf)))
            continue
        argument = next(nodes)
        meta: TensorMeta = argument.meta["tensors"][0]
        wanted = argument in node.meta["wants"]
        layout = (meta.shape, meta.stride, meta.dtype, meta.device, wanted)
        sharing = (
            storages.setdefault(storage_of(leaf), len(storages)),
            objects.setdefault(id(leaf), len(objects)),
        )
        cached = argument.op == "get_attr" and meta.requires_grad
        written = argument in node.meta["writes"]
        base = written_base(leaf) if written else None
        place = () if base is None else (base.shape, leaf.storage_offset())
        parts.append((layout, sharing, written, place, cached))
    return node.op, node.target, str(spec), tuple(parts), node.meta["ambient"]
