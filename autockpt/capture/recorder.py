"""The recorder: one real forward, written down call by call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from autockpt.capture.ambient import Ambient
from autockpt.capture.bits import identical
from autockpt.capture.captured import Capture
from autockpt.capture.clone import refuse_compiled
from autockpt.capture.finish import finish
from autockpt.capture.guards import ask
from autockpt.capture.key import Key
from autockpt.capture.losses import default_loss
from autockpt.capture.patches import patched
from autockpt.capture.restore import Trace, untraced
from autockpt.capture.stream import Stream, leaves
from autockpt.capture.targets import METADATA, QUESTIONS, REFUSED, Target, resolve
from autockpt.capture.tree import Template
from autockpt.errors import CaptureError

Loss = Callable[[Any], torch.Tensor]

_ANSWERS = (bool, int, float, complex, str)
_MAX_ASKED = 4096

# Functions whose result has a shape that depends on values. `tests` holds this against the
# tag `dynamic_output_shape` of the ATen ops.
DYNAMIC = frozenset(
    """
    nonzero nonzero_static argwhere masked_select unique unique_consecutive _unique _unique2
    unique_dim repeat_interleave bincount one_hot where tensor_split combinations
    _pack_padded_sequence _pad_packed_sequence histogramdd ctc_loss
    """.split()
)


# Functions that write statistics which their schema does not declare as written.
STATISTICS = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the recorded forward really returned.

    Attributes
    ----------
    outputs : tuple of Tensor
        Detached tensors of the model's output, in template order.
    loss : Tensor
        The detached scalar.
    closures : dict
        Tensors that the loss itself holds (labels, say), by target of their ``get_attr`` node.
    """

    outputs: tuple[torch.Tensor, ...]
    loss: torch.Tensor
    closures: dict[str, torch.Tensor] = field(default_factory=dict)


class Recorder(TorchFunctionMode):
    """A function mode that writes every torch call of this thread into a `Stream`."""

    def __init__(
        self,
        stream: Stream,
        before_write: Callable[[torch.Tensor], None],
        visit: Callable[[fx.Node, Any], None] | None = None,
    ) -> None:
        super().__init__()
        self.stream = stream
        self.paused = 0
        self.enter_module = stream.enter_module
        self.leave_module = stream.leave_module
        self.note = stream.note
        self.refuse = stream.refuse
        self._before_write = before_write
        self._visit = visit

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
            raise self.refuse(REFUSED[name], "Move that out of the forward.")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise self.refuse("a torch.func transform (vmap, grad, jvp) runs", "Unroll it.")
        if name in QUESTIONS and args and isinstance(args[0], torch.Tensor):
            return self._question(QUESTIONS[name], func, args, kwargs)
        if target.op == "set_property":
            raise self.refuse(f"the model sets '.{name}' of a tensor", "Use a new tensor.")
        return self._call(target, func, args, kwargs)

    def opaque(self, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Record a whole ``autograd.Function`` as one node; its inside is its own affair."""
        target = Target(name="apply", op="call_function", target=apply)
        return self._call(target, apply, args, dict(kwargs), opaque=True)

    def _question(self, kind: str, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        tensor = args[0]
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
        used: list[tuple[torch.Tensor, fx.Node]] = []
        graph_args = tuple(self.stream.convert(arg, used, opaque) for arg in args)
        graph_kwargs = {k: self.stream.convert(v, used, opaque) for k, v in kwargs.items()}
        if may_write(target.name, kwargs):
            for tensor, _ in used:
                self._before_write(tensor)
        before = [self._state(tensor, node) for tensor, node in used]
        self.paused += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self.paused -= 1
        written = [
            node
            for (tensor, node), (version, copy) in zip(used, before, strict=True)
            if _version(tensor) != version or (copy is not None and not identical(tensor, copy))
        ]
        if _writes_statistics(target.name, args, used):
            written += [node for _, node in used[1:] if node.meta.get("kind") == "buffer"]
        if not used and not leaves(result):
            return result
        node = self._emit(target, graph_args, graph_kwargs)
        node.meta["writes"] = tuple(dict.fromkeys(written))
        if opaque:
            node.meta["opaque"] = True
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            node.meta["pinned"] = True
        node.meta["call"] = True
        self.stream.register(node, result)
        if self._visit is not None:
            self._visit(node, result)
        if isinstance(result, _ANSWERS):
            self.stream.guard("value", node, result)
        elif isinstance(result, torch.Tensor) and depends_on_data(target.name, args, kwargs):
            self.stream.guard("shape", node, tuple(result.shape))
        return result

    @staticmethod
    def _state(tensor: torch.Tensor, node: fx.Node) -> tuple[int, torch.Tensor | None]:
        # Statistics are written behind the version counter's back, so buffers are compared.
        buffer = node.meta.get("kind") == "buffer" and not tensor.is_meta
        return _version(tensor), tensor.detach().clone() if buffer else None

    def _emit(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        if target.op == "get_property":
            return self.stream.emit("call_function", getattr, (args[0], target.name), {})
        if target.swapped:
            args = (args[1], args[0], *args[2:])
        return self.stream.emit(target.op, target.target, args, kwargs)


def _version(tensor: torch.Tensor) -> int:
    """A tensor's version counter; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def _writes_statistics(
    name: str, args: Sequence[Any], used: Sequence[tuple[torch.Tensor, fx.Node]]
) -> bool:
    """Whether a call on meta tensors, where nothing can be compared, writes statistics."""
    on_meta = any(tensor.is_meta for tensor, _ in used)
    return on_meta and name in STATISTICS and args[5:6] == (True,)


def may_write(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may write one of its arguments, going by its name."""
    return (
        name in STATISTICS
        or name == "__setitem__"
        or kwargs.get("out") is not None
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name.endswith("__"))
    )


def depends_on_data(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the shape of a call's result may depend on the values it is given."""
    if name in DYNAMIC:
        return True
    if name == "__getitem__":
        return any(t.dtype in (torch.bool, torch.uint8) or t.dim() == 0 for t in _index(args[1]))
    # A zero-dimensional integer where a size is expected: torch reads it without asking.
    others = leaves([*args[1:], kwargs])
    return any(t.dim() == 0 and not t.is_floating_point() for t in others)


def _index(index: Any) -> list[torch.Tensor]:
    if isinstance(index, slice):
        return leaves([index.start, index.stop, index.step])
    if isinstance(index, (tuple, list)):
        return [tensor for item in index for tensor in _index(item)]
    return leaves(index)


def record(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
) -> tuple[Capture, Recorded]:
    """Run the model's forward and loss once and write down what happened.

    Parameters
    ----------
    model : torch.nn.Module
        Its ``forward`` is run, with gradients enabled; hooks on the root are not.
    args, kwargs : sequence, mapping
        One batch.
    loss : callable, optional
        ``loss(outputs) -> scalar``. None: the output's ``.loss``, else a scalar output, else
        the sum of all differentiable floating outputs.

    Returns
    -------
    capture : Capture
    recorded : Recorded

    Raises
    ------
    CaptureError
        If the forward cannot be captured faithfully; the message says why and where.

    Notes
    -----
    Needs the memory of a forward without grad. Leaves no trace: random states, buffers,
    attributes of modules and arguments written in place are as before. One exception: a plain
    setting that the first forward makes and later ones leave alone (``config.problem_type``
    in transformers) is made, as the first forward would.
    """
    kwargs = dict(kwargs or {})
    for name, module in model.named_modules():
        refuse_compiled(name, module)
    refuse_modes()
    with untraced(model, args, kwargs) as trace, torch.enable_grad():
        found = _record(model, args, kwargs, loss, trace)
        if found is None:
            # A setting was made that is made once: the second forward finds it made.
            trace.undo_tensors()
            trace.settle()
            found = _record(model, args, kwargs, loss, trace)
    assert found is not None
    return found


def _record(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    loss: Loss | None,
    trace: Trace,
) -> tuple[Capture, Recorded] | None:
    stream = Stream(model, args, kwargs)
    ambient = Ambient.current(stream.device_types)
    key = Key.take(model, args, kwargs)
    recorder = Recorder(stream, trace.before_write)
    with patched(recorder), recorder, torch.autograd.graph.saved_tensors_hooks(_drop, _gone):
        output = model.forward(*args, **kwargs)
        recorder.paused += 1
        template, tensors = Template.describe(output)
        nodes = tuple(map(stream.node_of, tensors))
        recorder.paused -= 1
        stream.stage = "loss"
        scalar = loss(output) if loss is not None else default_loss(output, tensors)
    if not trace.verify(stream.refuse):
        return None
    graph, signature = finish(stream.graph, (nodes, stream.node_of(scalar)), model)
    capture = Capture(
        graph=graph,
        inputs=stream.inputs,
        outputs=template,
        key=key,
        ambient=ambient,
        signature=signature,
        notes=tuple(stream.notes),
    )
    outputs = tuple(tensor.detach() for tensor in tensors)
    return capture, Recorded(outputs=outputs, loss=scalar.detach(), closures=stream.closures)


def refuse_modes() -> None:
    """Raise if a function mode of the user's is in force: recomputation would run without it."""
    for mode in torch.overrides._get_current_function_mode_stack():
        if not isinstance(mode, torch.utils._device.DeviceContext):
            raise CaptureError(
                f"A TorchFunctionMode ({type(mode).__name__}) is active around the forward. It "
                "would not be when a region is run again in backward. Enter it inside the "
                "model's forward instead."
            )


def _drop(tensor: torch.Tensor) -> None:
    return None


def _gone(_: None) -> torch.Tensor:
    raise RuntimeError("saved tensors are thrown away while a forward is recorded")
