"""How gradients lie in memory when they reach an op.

The gradient of a sum is expanded, that of a transposed view is transposed: the backward that
such a one reaches may have to copy it. Which layout arrives where is the work of everything
behind, so the step is run once on fake tensors, forward and backward, which takes no memory.

Fake tensors do not always lie as real ones do (those of BatchNorm's backward keep the layout of
a transposed input, real ones are contiguous). What ops hand to their arguments is seen when they
are rehearsed: where that is not what the run on fake tensors said, it is run again with what was
seen in its place.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autockpt.capture import Capture, TensorMeta
from autockpt.capture.guards import expect
from autockpt.capture.lives import hold
from autockpt.capture.paths import read_path
from autockpt.profiler.facts import OpFacts
from autockpt.profiler.subject import Layout, outside_autocast
from autockpt.profiler.tensors import distinct, is_dense, settled, tensors_in

Strides = tuple[int, ...]

Handed = dict[int, Strides]
"""By number of an op's argument, how the gradient lies that the op hands to it."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """How the gradients of one step lie, as far as that is known.

    Attributes
    ----------
    arriving : dict
        The layouts of the gradients of what each op returns, tensors in order. Ops whose
        gradients all lie as their values do are left out.
    handed : dict
        What each op was seen or said to hand to those of its arguments that ops have made.
    """

    arriving: dict[fx.Node, tuple[Layout, ...]] = field(default_factory=dict)
    handed: dict[fx.Node, Handed] = field(default_factory=dict)

    def mistaken(self, facts: Mapping[fx.Node, OpFacts]) -> dict[fx.Node, Handed]:
        """Give the ops that hand on otherwise than this says, with what they were seen to."""
        found: dict[fx.Node, Handed] = {}
        for node, said in self.handed.items():
            seen = {g.argument: g.strides for g in facts[node].gradients if g.strides is not None}
            if any(number in seen and seen[number] != said[number] for number in said):
                found[node] = seen
        return found


def gradient_layouts(
    capture: Capture,
    model: nn.Module,
    tensors: Sequence[torch.Tensor],
    closures: Mapping[str, torch.Tensor],
    seen: Mapping[fx.Node, Handed] | None = None,
) -> Layouts:
    """Find how the gradients of a step lie.

    ``seen`` are ops of which it is known what they hand on. Nothing is found where the step
    cannot be run on fake tensors, as with calls that are not torch's own and write in place.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.enable_grad(), _unlogged():
        runner = _Runner(capture, model, mode, closures, seen or {})
        try:
            runner.run(*tensors)
            torch.clear_autocast_cache()
            runner.differentiate()
        except Exception:  # noqa: BLE001, whatever an op has against fake tensors
            return Layouts()
        finally:
            torch.clear_autocast_cache()
    arriving = {node: tuple(found) for node, found in runner.layouts.items() if any(found)}
    return Layouts(arriving, runner.handed)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep torch from logging as errors what an op has against fake tensors: that is expected."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


class _Runner(fx.Interpreter):
    """Runs the graph on fake tensors; hooks on the results write the layouts down."""

    def __init__(
        self,
        capture: Capture,
        model: nn.Module,
        mode: FakeTensorMode,
        closures: Mapping[str, torch.Tensor],
        seen: Mapping[fx.Node, Handed],
    ) -> None:
        super().__init__(model, garbage_collect_values=True, graph=capture.graph)
        self.extra_traceback = False
        self.layouts: dict[fx.Node, list[Layout]] = {}
        self.handed: dict[fx.Node, Handed] = {}
        self._seen = seen
        self._model, self._mode, self._closures = model, mode, closures
        self._fakes: dict[int | str, torch.Tensor] = {}
        self._leaves: list[torch.Tensor] = []
        self._loss: torch.Tensor | None = None

    def run_node(self, n: fx.Node) -> Any:
        """Run one node on fake tensors."""
        if n.op == "placeholder":
            return self._fake(super().run_node(n))
        if n.op == "get_attr":
            held = self._closures.get(str(n.target))
            if held is not None:
                # Made for us alone, perhaps: its id says nothing.
                return self._fake(held, str(n.target))
            return self._fake(read_path(self._model, str(n.target)))
        if n.op == "output":
            output: Any = n.args[0]
            self._loss = self.env[output[1]]
            return None
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is hold:
            return None
        if n.target is expect:
            return args[1]
        if n.target is operator.getitem and isinstance(args[0], tuple | list):
            return args[0][args[1]]
        with n.meta["ambient"].enter():
            result = self._call(n, *self._tapped(n, args, kwargs))
        self._watch(n, [*tensors_in(result), *self._written(n, (args, kwargs), result)])
        return result

    def differentiate(self) -> None:
        """Run backward: the hooks are called."""
        assert self._loss is not None
        with outside_autocast(self._loss.device.type):
            torch.autograd.grad(self._loss, self._leaves, allow_unused=True)

    def _fake(self, tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
        key = id(tensor) if name is None else name
        fake = self._fakes.get(key)
        if fake is None:
            fake = self._mode.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
            self._fakes[key] = fake
            if tensor.requires_grad:
                self._leaves.append(fake)
        return fake

    def _tapped(
        self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give a call aliases of what it is given, which note what gradients it hands on."""
        handed = self.handed[node] = {}
        if not torch.is_grad_enabled():
            return args, kwargs
        written = {id(self.env[argument]) for argument in node.meta["writes"]}
        taps: dict[int, torch.Tensor] = {}
        for number, tensor in enumerate(distinct(tensors_in((args, kwargs)))):
            if tensor.is_leaf or not tensor.requires_grad or tensor.layout is not torch.strided:
                continue
            if id(tensor) in written:
                continue
            taps[id(tensor)] = tap = torch.ops.aten.alias.default(tensor)
            tap.register_hook(partial(_note_handed, handed, number))
        if not taps:
            return args, kwargs
        tapped: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
            torch.Tensor, lambda tensor: taps.get(id(tensor), tensor), (args, kwargs)
        )
        return tapped

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known: Any = self._seen.get(node)
        if known is None and not (node.meta.get("opaque") or node.meta.get("pinned")):
            try:
                result = _run(node, args, kwargs)
            except Exception:  # sizes that depend on data, no rule for fake tensors: by its looks
                if node.meta["writes"]:
                    raise
            else:
                if self._stays_written(node) or _lie_as_recorded(tensors_in(result), _metas(node)):
                    return result
        tensors = distinct(tensors_in((args, kwargs)))
        unknown: Any = _Unknown
        found = [unknown.apply(meta, known or {}, *tensors) for meta in _metas(node)]
        return found if node.meta.get("several") or len(found) != 1 else found[0]

    def _stays_written(self, node: fx.Node) -> bool:
        """Tell whether gradients go through what an op has written in place."""
        return any(self.env[argument].requires_grad for argument in node.meta["writes"])

    def _written(self, node: fx.Node, arguments: Any, result: Any) -> list[torch.Tensor]:
        """What the op wrote in place and did not return, in the order of a rehearsal."""
        returned = {id(tensor) for tensor in tensors_in(result)}
        written = {id(self.env[argument]) for argument in node.meta["writes"]} - returned
        return [tensor for tensor in distinct(tensors_in(arguments)) if id(tensor) in written]

    def _watch(self, node: fx.Node, results: Sequence[torch.Tensor]) -> None:
        layouts: list[Layout] = [None] * len(results)
        self.layouts[node] = layouts
        for index, result in enumerate(results):
            if result.requires_grad and result.layout is torch.strided:
                _on_gradient(result, _note(layouts, index, _own(result)))


def _on_gradient(tensor: torch.Tensor, note: Callable[[torch.Tensor], None]) -> None:
    """Call a function with the gradient of a tensor as it is now, whatever is written to it later.

    A hook of the tensor itself would not do: it fails on some views that were written in place.
    """
    if tensor.is_leaf:
        tensor.register_hook(note)
        return
    edge = torch.autograd.graph.get_gradient_edge(tensor)

    def before(gradients: tuple[torch.Tensor | None, ...]) -> None:
        gradient = gradients[edge.output_nr]
        if gradient is not None:
            note(gradient)

    edge.node.register_prehook(before)


def _run(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _lie_as_recorded(results: Sequence[torch.Tensor], metas: Sequence[TensorMeta]) -> bool:
    """Tell whether fake results lie as the real ones did, where sizes are the same."""
    return all(
        result.layout is not torch.strided
        or tuple(result.shape) != meta.shape
        or settled(meta.shape, result.stride()) == settled(meta.shape, meta.stride)
        for result, meta in zip(results, metas, strict=False)
    )


def _note_handed(handed: Handed, number: int, gradient: torch.Tensor) -> None:
    handed[number] = settled(gradient.shape, gradient.stride())


def _own(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a gradient that lies as its value does (contiguous if that has gaps)."""
    return (
        tensor.stride()
        if is_dense(tensor)
        else torch.empty_like(tensor, memory_format=torch.contiguous_format).stride()
    )


def _note(
    layouts: list[Layout], index: int, own: tuple[int, ...]
) -> Callable[[torch.Tensor], None]:
    def note(gradient: torch.Tensor) -> None:
        strides = gradient.stride()
        differs = any(
            size > 1 and one != other
            for size, one, other in zip(gradient.shape, strides, own, strict=True)
        )
        layouts[index] = strides if differs else None

    return note


def _metas(node: fx.Node) -> tuple[TensorMeta, ...]:
    metas: tuple[TensorMeta, ...] = node.meta["tensors"]
    return metas


class _Unknown(torch.autograd.Function):
    """An op that is known by its results only, and by what it was seen to hand on.

    Otherwise its gradients lie as its arguments do.
    """

    @staticmethod
    def forward(ctx: Any, meta: TensorMeta, seen: Handed, *arguments: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*arguments)
        ctx.seen = seen
        result = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
        if not meta.requires_grad:
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        gradients = [
            _gradient(tensor, ctx.seen.get(number)) if needed else None
            for number, (tensor, needed) in enumerate(wanted)
        ]
        return (None, None, *gradients)


def _gradient(tensor: torch.Tensor, strides: Strides | None) -> torch.Tensor:
    if strides is None:
        return torch.empty_like(tensor)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
