"""The function mode that sees every torch call of a forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from autockpt.capture.bits import identical
from autockpt.capture.calls import (
    STATISTICS,
    depends_on_data,
    may_write,
    version,
    writes_statistics,
)
from autockpt.capture.guards import ask
from autockpt.capture.masks import Masks, Whole, needs_alike
from autockpt.capture.refusals import drop
from autockpt.capture.restore import Trace, default_states
from autockpt.capture.stream import Stream, leaves
from autockpt.capture.targets import METADATA, QUESTIONS, REFUSED, Target, resolve

_ANSWERS = (bool, int, float, complex, str)
_MAX_ASKED = 4096


class Recorder(TorchFunctionMode):
    """A function mode that writes every torch call of this thread into a `Stream`."""

    def __init__(
        self,
        stream: Stream,
        trace: Trace,
        visit: Callable[[fx.Node, Any], None] | None = None,
        *,
        apart: bool = False,
    ) -> None:
        super().__init__()
        self.stream = stream
        self.paused = 0
        self.enter_module = stream.enter_module
        self.leave_module = stream.leave_module
        self.note = stream.note
        self.refuse = stream.refuse
        self._trace = trace
        self._visit = visit
        self._masks = Masks() if apart else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        target = resolve(func)
        name = target.name
        if name in METADATA:
            return func(*args, **kwargs)
        if name in REFUSED:
            return self._refused(name, func, args, kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            if self.stream.lenient:
                self.stream.forbid("a torch.func transform runs in it")
                return func(*args, **kwargs)
            raise self.refuse(
                "a torch.func transform (vmap, grad, jvp) runs",
                "Leave that part out of the module that is optimized.",
            )
        if name in QUESTIONS and args and isinstance(args[0], torch.Tensor):
            return self._question(QUESTIONS[name], func, args, kwargs)
        if target.op == "set_property":
            if name == "requires_grad":
                return torch.Tensor.requires_grad_(*args)
            if self.stream.lenient:
                self.stream.forbid(f"it sets '.{name}' of a tensor")
                return func(*args, **kwargs)
            raise self.refuse(f"the model sets '.{name}' of a tensor", "Use a new tensor.")
        return self._apart(target, func, args, kwargs)

    def _apart(self, target: Target, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Write a call down in the steps that it comes apart into, if any."""
        if self._masks is None:
            return self._call(target, func, args, kwargs)
        self.paused += 1
        try:
            steps = self._masks.steps(func, args, kwargs)
        finally:
            self.paused -= 1
        if steps is None:
            return self._call(target, func, args, kwargs)
        used = tuple(self.stream.convert(arg, [], False) for arg in args)
        named = {k: self.stream.convert(v, [], False) for k, v in kwargs.items()}
        parts: list[fx.Node] = []
        result = steps(partial(self._step, parts), *args, **kwargs)
        alike = needs_alike(args, kwargs, parts)
        whole = Whole(target=func, args=used, kwargs=named, parts=tuple(parts), alike=alike)
        for part in parts:
            part.meta["whole"] = whole
        return result

    def _step(self, parts: list[fx.Node], func: Callable[..., Any], *args: Any) -> Any:
        result = self._call(resolve(func), func, args, {})
        parts.append(self.stream.last)
        return result

    def _refused(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run what no graph may hold, if none is to be emitted."""
        if not self.stream.lenient or name == "backward":
            raise self.refuse(REFUSED[name], "Move that out of the forward.")
        if name != "register_hook":  # which does no harm to a graph that autograd never runs
            self.stream.forbid(REFUSED[name])
        return func(*args, **kwargs)

    def opaque(self, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Record a whole ``autograd.Function`` as one node; its inside is its own affair."""
        target = Target(name="apply", op="call_function", target=apply)
        # Called by the model itself, not by torch: the mode is still on for our own book-keeping.
        self.paused += 1
        try:
            return self._call(target, apply, args, dict(kwargs), opaque=True)
        finally:
            self.paused -= 1

    def dissolve(self) -> None:
        """Take note that the model calls ``checkpoint`` itself."""
        if self.stream.lenient:
            raise self.refuse(
                "the model calls checkpoint itself, and its own Python would run",
                "Switch that off: model.gradient_checkpointing_disable() in transformers.",
            )
        self.note(
            "the model's own checkpoint calls were dissolved and planned anew: the plain step is "
            "the one without them"
        )

    def cast(self, module: torch.nn.Module, run: Callable[[], Any]) -> Any:
        """Run a ``module.to(...)`` in the forward, unseen: it is to find all as it should be."""
        self.paused += 1
        try:
            before = [(t, t.data) for t in (*module.parameters(), *module.buffers())]
            result = run()
            after = [*module.parameters(), *module.buffers()]
            same = len(after) == len(before) and all(
                now is tensor and now.dtype is data.dtype and now.data_ptr() == data.data_ptr()
                for now, (tensor, data) in zip(after, before, strict=True)
            )
            if not (same or self.stream.lenient):
                for tensor, data in before:
                    tensor.data = data
        finally:
            self.paused -= 1
        if self.stream.lenient and not same:
            self.stream.forbid("it casts or moves a module")
        elif not same:
            raise self.refuse(
                f"the model casts or moves a module ({type(module).__name__})",
                "Do that once, before the model is optimized.",
            )
        return result

    def _question(self, kind: str, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        tensor = args[0]
        if self.stream.lenient:
            return func(*args, **kwargs)
        if tensor.numel() > _MAX_ASKED:
            raise self.refuse(
                f"python reads all {tensor.numel()} values of a tensor ({kind})",
                "Compute with tensors instead.",
            )
        node = self.stream.node_of(tensor)
        answer = func(*args, **kwargs)
        self.stream.guard(kind, node, ask(kind, tensor))
        return answer

    def _call(
        self,
        target: Target,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        opaque: bool = False,
    ) -> Any:
        if not leaves((args, kwargs)):
            return self._source(target, func, args, kwargs)
        used: list[tuple[torch.Tensor, fx.Node]] = []
        graph_args = tuple(self.stream.convert(arg, used, opaque) for arg in args)
        graph_kwargs = {k: self.stream.convert(v, used, opaque) for k, v in kwargs.items()}
        if may_write(target.name, kwargs):
            for tensor, node in used:
                self._trace.before_write(tensor, known=node.op == "get_attr")
        self._before_draw(args, kwargs)
        self._refuse_hooks()
        # As it is now: a write in place may have made it so since the tensor was made.
        wants = tuple(dict.fromkeys(node for tensor, node in used if tensor.requires_grad))
        hidden = [
            node.meta.get("kind") == "buffer"
            or (target.name in STATISTICS and tensor is not args[0])
            for tensor, node in used
        ]
        before = [
            self._state(tensor, compare) for (tensor, _), compare in zip(used, hidden, strict=True)
        ]
        result, drew = self._run(func, args, kwargs)
        written = [
            node
            for (tensor, node), (number, copy) in zip(used, before, strict=True)
            if version(tensor) != number or (copy is not None and not identical(tensor, copy))
        ]
        if writes_statistics(target.name, args):
            written += [node for _, node in used[1:] if node.meta.get("kind") == "buffer"]
        node = self._emit(target, graph_args, graph_kwargs)
        node.meta["writes"] = tuple(dict.fromkeys(written))
        node.meta["wants"] = wants
        if opaque:
            node.meta["opaque"] = True
        node.meta["draws"] = drew
        self._finish(node, target, args, kwargs, result)
        return result

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Run a call unseen; say whether it drew from a default generator."""
        before = default_states()
        self.paused += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self.paused -= 1
        return result, not all(map(torch.equal, before, default_states()))

    def _source(
        self, target: Target, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a call without tensors among its arguments: a factory, or no matter of ours."""
        self._before_draw(args, kwargs)
        result, drew = self._run(func, args, kwargs)
        if leaves(result):
            graph_args = tuple(self.stream.convert(arg, [], False) for arg in args)
            graph_kwargs = {k: self.stream.convert(v, [], False) for k, v in kwargs.items()}
            node = self._emit(target, graph_args, graph_kwargs)
            node.meta["draws"] = drew
            self._finish(node, target, args, kwargs, result)
        return result

    def _before_draw(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for generator in _generators(args, kwargs):
            wrong = self._trace.before_draw(generator)
            if wrong and not self.stream.lenient:
                raise self.refuse(
                    wrong,
                    "Keep it as an attribute of a module and seed it outside the forward, or draw "
                    "from the default generator.",
                )

    def _finish(
        self, node: fx.Node, target: Target, args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> None:
        """Say what a call returned, and guard what python learns from it."""
        for generator in _generators(args, kwargs):
            self._trace.after_draw(generator)
            node.meta["pinned"] = True
        node.meta["call"] = True
        self.stream.register(node, result)
        if self._visit is not None:
            self._visit(node, result)
        if isinstance(result, _ANSWERS):
            self.stream.guard("value", node, result)
            return
        dynamic = depends_on_data(target.name, args, kwargs)
        if isinstance(result, torch.Tensor) and dynamic:
            self.stream.guard("shape", node, tuple(result.shape))
        elif isinstance(result, (tuple, list)):
            for index, item in enumerate(result):
                shaped = dynamic and isinstance(item, torch.Tensor)
                if shaped or isinstance(item, _ANSWERS):
                    child = self.stream.emit("call_function", getitem, (node, index), {})
                    kind, value = ("shape", tuple(item.shape)) if shaped else ("value", item)
                    self.stream.guard(kind, child, value)

    def _refuse_hooks(self) -> None:
        # Ours are the innermost, unless the forward itself entered some.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and hooks[0] not in (drop, None):
            raise self.refuse(
                "saved-tensor hooks (save_on_cpu, say) are in force inside the forward",
                "Enter them around the optimized model instead.",
            )

    @staticmethod
    def _state(tensor: torch.Tensor, compare: bool) -> tuple[int, torch.Tensor | None]:
        # Statistics are written behind the version counter's back: their values are compared.
        copied = compare and not tensor.is_meta
        return version(tensor), tensor.detach().clone() if copied else None

    def _emit(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        if target.op == "get_property":
            return self.stream.emit("call_function", getattr, (args[0], target.name), {})
        if target.swapped:
            args = (args[1], args[0], *args[2:])
        return self.stream.emit(target.op, target.target, args, kwargs)


def _generators(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Generator]:
    values = (*args, *kwargs.values())
    return [value for value in values if issubclass(type(value), torch.Generator)]
