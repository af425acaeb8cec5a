"""The stream of calls as it is written down: nodes, and which tensor is which node."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import getitem as _getitem
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from autockpt.capture import guards
from autockpt.capture.ambient import Ambient
from autockpt.capture.captured import TensorMeta
from autockpt.capture.externals import Externals
from autockpt.capture.paths import Path, forward_of
from autockpt.capture.restore import RandomState
from autockpt.capture.sources import source_line
from autockpt.capture.tree import Inputs
from autockpt.errors import CaptureError

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Generator,
)


class Stream:
    """Writes an ``fx.Graph`` and knows the node of every tensor that is alive.

    Parameters
    ----------
    model : torch.nn.Module
        The root, whose tensors become ``get_attr`` nodes.
    args, kwargs : sequence, mapping
        The call, whose tensors become placeholders.
    lenient : bool
        Whether the forward is only looked at, as it will not be emitted: tensors of unknown
        origin are taken as they are, and what python asks for is no guard.

    Notes
    -----
    Tensors are held weakly: recording must not keep alive what the forward lets go of.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        lenient: bool = False,
    ) -> None:
        self.graph = fx.Graph()
        self.lenient = lenient
        # Numbers of the module calls that are under way, and of those that must not run again.
        # A lenient recording is told by its caller, another one counts by itself.
        self.calls: list[int] = []
        self.called: list[str] = []
        self._counts: Counter[str] = Counter()
        self._numbered: list[bool] = []
        # Where tensors died: the node that made one, the last op by then, the calls under way.
        self.deaths: list[tuple[fx.Node, fx.Node, tuple[int, ...]]] = []
        self._last: fx.Node | None = None
        self._references: list[Any] = []
        self.forbidden: dict[int, str] = {}
        self.inputs = Inputs.discover(forward_of(model), args, kwargs)
        self.externals = Externals(model)
        self.stage = "model"
        self.modules: list[str] = []
        self.notes: list[str] = []
        self.drawn_in = ""
        # The type of the model's output, once there is one.
        self.returned = ""
        self._random = RandomState()
        self.closures: dict[str, torch.Tensor] = {}
        self._call = (args, kwargs)
        self._names = {id(module): name for name, module in model.named_modules()}
        self._nodes: Any = WeakTensorKeyDictionary()
        tensors = self.inputs.tensors(args, kwargs)
        for path, tensor in zip(self.inputs.paths, tensors, strict=True):
            self._placeholder(path, tensor)
        parameters = (*model.parameters(), *model.buffers(), *tensors)
        self.device_types = tuple(sorted({"cpu", *(t.device.type for t in parameters)}))

    # What surrounds a call.

    @property
    def module(self) -> str:
        """Dotted path of the module whose forward runs."""
        return self.modules[-1] if self.modules else ""

    def enter_module(self, module: torch.nn.Module) -> None:
        """Follow the path of modules; one that is not in the model counts as its caller's."""
        path = self._names.get(id(module))
        self.modules.append(self.module if path is None else path)
        # As in ``modules.run.Run``, calls without grad have no number.
        numbered = path is not None and not self.lenient and torch.is_grad_enabled()
        self._numbered.append(numbered)
        if numbered and path is not None:
            number = self._counts[path]
            self._counts[path] += 1
            self.calls.append(len(self.called))
            self.called.append(f"{path}:{number}" if number else path)

    def leave_module(self) -> None:
        """Return to the calling module."""
        if not self.drawn_in and not self._random.python_is_same():
            self.drawn_in = f"'{self.module}'"
        self.modules.pop()
        if self._numbered.pop():
            self.calls.pop()

    def note(self, text: str) -> None:
        """Remember a remark for the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def forbid(self, reason: str) -> None:
        """Remember that the module calls under way must not run again."""
        for number in self.calls:
            self.forbidden.setdefault(number, reason)

    def refuse(self, reason: str, advice: str) -> CaptureError:
        """Make the error that says what cannot be captured, where, and what to do."""
        where = f"'{self.module or 'the model'}' ({source_line(2)})"
        if self.returned and self.stage == "model":
            where = f"the output of the model ({self.returned})"
        return CaptureError(f"Cannot capture this forward: {reason}, at {where}. {advice}")

    # From values to nodes.

    def convert(self, value: Any, used: list[tuple[torch.Tensor, fx.Node]], free: bool) -> Any:
        """Turn an argument into what a node holds: nodes and constants, nested.

        Parameters
        ----------
        value : object
            An argument of a recorded call.
        used : list of (Tensor, Node)
            Gets the tensors that were found.
        free : bool
            Whether constants may be of any type (an opaque unit's arguments).
        """
        if isinstance(value, torch.Tensor):
            node = next((node for tensor, node in used if tensor is value), None)
            node = self.node_of(value) if node is None else node
            used.append((value, node))
            return node
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, (list, tuple)):
            items = [self.convert(item, used, free) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {key: self.convert(item, used, free) for key, item in value.items()}
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return slice(*(self.convert(part, used, free) for part in parts))
        if isinstance(value, np.ndarray):
            return self._array(value)
        if free or self.lenient or isinstance(value, type) or callable(value):
            return value
        raise self.refuse(
            f"a torch call is given a {type(value).__name__}",
            "Pass tensors, numbers or containers of them.",
        )

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Find the node of a tensor; read it from the module or the arguments where need be."""
        external = self.externals.get(tensor)
        if external is None:
            if (node := self._nodes.get(tensor)) is not None:
                return node  # type: ignore[no-any-return]
            if (path := self.inputs.locate(tensor, *self._call)) is not None:
                self.inputs = replace(self.inputs, paths=(*self.inputs.paths, path))
                return self._placeholder(path, tensor)
            external = self.externals.search(tensor)
            if external is None and self.lenient:
                external = self.externals.current(tensor)
        if external is None and (self.lenient or self.stage == "loss"):
            return self._closure(tensor)
        if external is None:
            raise self.refuse(
                f"a tensor of shape {tuple(tensor.shape)} comes from outside torch's recorded "
                "calls (torch.from_numpy, torch.Tensor([...]), a closure, a scripted or "
                "compiled function)",
                "Make it with torch.tensor or torch.as_tensor, register it as a buffer, or "
                "pass it to the forward.",
            )
        node = self.graph.create_node("get_attr", external.target)
        node.meta["kind"] = external.kind
        self._describe(node, (tensor,))
        return node

    def _closure(self, tensor: torch.Tensor) -> fx.Node:
        """Add a tensor that is held elsewhere; it is never emitted, so never found again."""
        node = self.graph.create_node("get_attr", f"closure_{len(self.closures)}")
        node.meta["kind"] = "closure"
        self._describe(node, (tensor,))
        self.closures[str(node.target)] = tensor
        self._nodes[tensor] = node
        return node

    def _array(self, value: np.ndarray[Any, Any]) -> fx.Node:
        if value.size > 1024 and not self.lenient:
            raise self.refuse(
                f"a numpy array of shape {value.shape} enters a torch call",
                "Make it a buffer of the module.",
            )
        node = self.graph.call_function(np.array, (value.tolist(),), {"dtype": str(value.dtype)})
        self._describe(node, ())
        return node

    def _placeholder(self, path: Path, tensor: torch.Tensor) -> fx.Node:
        first = next((n for n in self.graph.nodes if n.op != "placeholder"), self.graph._root)
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(_identifier(path))
        node.meta["path"] = path
        self._describe(node, (tensor,))
        # One tensor passed twice is one node: the first of its placeholders.
        if self._nodes.get(tensor) is None:
            self._nodes[tensor] = node
        return node

    def is_of_step(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an argument of this step, or made by a call of it."""
        node = self._nodes.get(tensor)
        return node is not None and node.meta.get("kind") != "closure"

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor comes from constants and the module alone: no input, no draw."""
        node = self._nodes.get(tensor)
        if node is None or tensor.requires_grad:
            return False
        pending, seen = [node], {node}
        while pending:
            for source in pending.pop().all_input_nodes:
                if source not in seen:
                    seen.add(source)
                    pending.append(source)
        return all(n.op != "placeholder" and not n.meta.get("draws") for n in seen)

    # Writing nodes.

    @property
    def last(self) -> fx.Node:
        """The node of the last call."""
        assert self._last is not None
        return self._last

    def emit(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Append a node for a call that is about to run."""
        node = self.graph.create_node(op, target, args, kwargs)
        self._describe(node, ())
        self._last = node
        return node

    def register(self, node: fx.Node, result: Any) -> None:
        """Say what a node's call returned."""
        tensors: list[torch.Tensor] = []
        self._register(node, result, tensors)
        node.meta["tensors"] = tuple(map(TensorMeta.of, tensors))

    def _register(self, node: fx.Node, result: Any, tensors: list[torch.Tensor]) -> None:
        if isinstance(result, torch.Tensor):
            tensors.append(result)
            if self.externals.get(result) is None:
                self._nodes[result] = node
                if self.lenient:
                    self._await(node, result)
            return
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(result, (tuple, list)):
            items = enumerate(result)
        elif isinstance(result, dict):
            items = result.items()
        for key, item in items:
            if holds_tensor(item):
                node.meta["several"] = True
                child = self.graph.call_function(_getitem, (node, key))
                self._describe(child, ())
                self.register(child, item)
                tensors.extend(leaves(item))

    def _await(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """Note when Python lets go of a tensor: its own code holds on to some after their use."""

        def died(_: Any) -> None:
            if self._last is not None:
                self.deaths.append((node, self._last, tuple(self.calls)))

        self._references.append(weakref.ref(tensor, died))

    def guard(self, kind: str, node: fx.Node, expected: Any) -> None:
        """Append a guard."""
        if self.lenient:
            return
        guard = self.graph.call_function(guards.expect, (kind, node, expected))
        self._describe(guard, ())

    def _describe(self, node: fx.Node, tensors: tuple[torch.Tensor, ...]) -> None:
        node.meta["module"] = self.module
        node.meta["source"] = source_line(2)
        node.meta["ambient"] = Ambient.current(getattr(self, "device_types", ("cpu",)))
        node.meta["stage"] = self.stage
        node.meta["calls"] = tuple(self.calls)
        node.meta["writes"] = ()
        node.meta["wants"] = ()
        node.meta["tensors"] = tuple(map(TensorMeta.of, tensors))


def leaves(value: Any) -> list[torch.Tensor]:
    """Tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for item in value for tensor in leaves(item)]


def holds_tensor(value: Any) -> bool:
    """Whether there is a tensor in nested tuples, lists and dicts."""
    return bool(leaves(value))


def _identifier(path: Path) -> str:
    text = "_".join([path.root.replace("*", "arg_"), *(str(key) for _, key in path.steps)])
    return "".join(c if c.isalnum() else "_" for c in text)
