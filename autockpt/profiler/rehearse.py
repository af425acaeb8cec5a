"""Runs one op apart, forward and backward, on its real arguments, and writes down the facts.

The op is run twice: once under a dispatch mode that counts FLOPs and sees random draws, once
bare with the allocator watched, as a dispatch mode changes what autograd does in place. The
rest of the model is a function behind the op whose backward allocates the incoming gradients,
so that autograd owns them as it does in a real step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from autockpt.errors import ProfileError
from autockpt.meters import Meter
from autockpt.profiler.aten_log import AtenLog, Tally
from autockpt.profiler.cost import OpWork
from autockpt.profiler.facts import ArgumentGradient, OpFacts, Ref, Result

_TIMED_RUNS = 3

Layout = tuple[int, ...] | None
"""Strides of a gradient; None where it lies as its value does."""


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of a living tensor's storage (layouts without a storage count as their own)."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Allocated bytes of a tensor's storage."""
    if tensor.layout is not torch.strided:
        return int(tensor._nnz()) * tensor.element_size()
    return int(tensor.untyped_storage().nbytes())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory, each once: autograd may add into it."""
    if tensor.layout is not torch.strided:
        return False
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors of a nested result or argument, in order, repeats included."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in order, each object once."""
    return list({id(tensor): tensor for tensor in tensors}.values())


class _Rest(torch.autograd.Function):
    """The rest of the model: its backward allocates the gradients that reach the op."""

    @staticmethod
    def forward(
        ctx: Any,
        arrived: Callable[[tuple[torch.Tensor, ...]], None],
        layouts: Sequence[Layout],
        *results: Any,
    ) -> Any:
        ctx.arrived = arrived
        ctx.layouts = [
            (tuple(r.shape), layout or (r.stride() if is_dense(r) else None), r.dtype, r.device)
            for r, layout in zip(results, layouts, strict=True)
        ]
        return torch.zeros((), device=results[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients = tuple(_ones(*layout) for layout in ctx.layouts)
        ctx.arrived(gradients)
        return (None, None, *gradients)


def _rest(
    subject: Subject,
    results: Sequence[torch.Tensor],
    differentiable: Sequence[int],
    arrived: Callable[[tuple[torch.Tensor, ...]], object],
) -> torch.Tensor:
    """A scalar behind an op's results; ``arrived`` is called with their gradients."""
    layouts = [subject.layouts[i] if subject.layouts else None for i in differentiable]
    end: torch.Tensor = _Rest.apply(  # type: ignore[no-untyped-call]
        arrived, layouts, *(results[i] for i in differentiable)
    )
    return end


@contextmanager
def outside_autocast(device_type: str) -> Iterator[None]:
    """As a real step runs backward: after the autocast block around its forward."""
    with ExitStack() as stack:
        for kind in {"cpu", device_type}:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _differentiate(end: torch.Tensor, wanted: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
    with outside_autocast(end.device.type):
        found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(end, wanted, allow_unused=True)
    return found


def _ones(
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    if stride is None or 0 in shape:
        return torch.ones(shape, dtype=dtype, device=device)
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return torch.ones(reach, dtype=dtype, device=device).as_strided(shape, stride)


@dataclass(slots=True)
class Rehearsal:
    """Facts of one op, complete once the meter is closed and ``finish`` was called."""

    facts: OpFacts
    name: str
    measured: bool = False
    differentiable: bool = False
    packs: int = 0
    hides: bool = False
    unpacks: bool = False

    def finish(self, watch: Meter) -> OpFacts:
        """Add the workspaces."""
        if not self.measured:
            return self.facts
        made = sum(self.facts.hidden_bytes) + sum(
            result.storage_bytes
            for index, result in enumerate(self.facts.results)
            if result.storage == ("result", index)
        )
        forward = watch.span(f"{self.name}.forward", f"{self.name}.forward.end")
        workspace = max(0, forward.peak_bytes - made)
        backward_workspace = 0
        if self.differentiable:
            backward = watch.span(f"{self.name}.backward", f"{self.name}.backward.end")
            fresh = sum(self.facts.fresh_gradient_bytes)
            # Negative where a composite op frees what it hid before its last gradient is made.
            hidden = sum(self.facts.hidden_bytes)
            backward_workspace = max(-hidden, backward.peak_bytes - fresh)
        stop = 0
        if self.packs:
            stop = watch.span(f"{self.name}.stop", f"{self.name}.stop.{self.packs}").peak_bytes
        dropped = workspace
        if self.hides:
            dropped = watch.span(f"{self.name}.dropped", f"{self.name}.dropped.end").peak_bytes
            dropped -= made
        early = 0
        if self.unpacks:
            early = watch.span(f"{self.name}.early", f"{self.name}.unpacked").end_bytes
        return replace(
            self.facts,
            early_backward_bytes=early,
            dropped_workspace_bytes=dropped,
            forward_workspace_bytes=workspace,
            backward_workspace_bytes=backward_workspace,
            stop_peak_bytes=stop,
        )


@dataclass(slots=True)
class Subject:
    """The op to rehearse: its call, its real arguments, and what the capture says of them.

    ``differentiable`` are the ids of tensor arguments that require grad in the real step;
    ``written`` the ids of those that the op writes in place (it gets copies of these);
    ``external`` the ids of those that are there before the step (parameters, the batch);
    ``layouts`` how the gradients of its results arrive, if not all as their values lie.
    """

    name: str
    target: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    differentiable: frozenset[int]
    written: frozenset[int]
    external: frozenset[int] = frozenset()
    layouts: tuple[Layout, ...] = ()
    tensors: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = distinct(tensors_in((self.args, self.kwargs)))

    def stand_ins(self) -> tuple[list[torch.Tensor], tuple[Any, ...], dict[str, Any], list[Any]]:
        """Leaves on the same storages, the arguments made of them, and their gradient edges."""
        leaves: dict[int, torch.Tensor] = {}
        edges: list[Any] = []
        for tensor in self.tensors:
            leaf = tensor.detach()
            if id(tensor) in self.differentiable:
                leaf.requires_grad_()
            if id(tensor) in self.written:
                leaf = leaf.clone()
            leaves[id(tensor)] = leaf
            if leaf.requires_grad:
                edges.append(torch.autograd.graph.get_gradient_edge(leaf))
            else:
                edges.append(None)
        swap = lambda leaf: leaves[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        args, kwargs = pytree.tree_map(swap, (self.args, self.kwargs))
        return list(leaves.values()), args, kwargs, edges


def rehearse(
    subject: Subject, watch: Meter, cost: Callable[[OpWork], int], *, timed: bool, measured: bool
) -> Rehearsal:
    """Run an op apart and return what was seen; costs of a real run only if ``timed``."""
    try:
        facts = _logged_run(subject)
        rehearsal = Rehearsal(facts=facts.facts, name=subject.name)
        if measured:
            rehearsal.measured = True
            rehearsal.differentiable = _watched_run(subject, watch, facts.differentiable)
            if facts.at_stop.calls:
                rehearsal.packs = _stopped_run(subject, watch)
            if facts.facts.hidden_bytes:
                rehearsal.hides = True
                _dropped_run(subject, watch)
                rehearsal.unpacks = _unpacked_run(subject, watch, facts.differentiable)
        forward_ns, backward_ns = _timed_runs(subject, facts) if timed else (0, 0)
    except torch.OutOfMemoryError as error:
        raise ProfileError(
            f"The device ran out of memory while '{subject.target}' was measured apart. Plan "
            f"with cost='roofline', or with a smaller batch."
        ) from error
    rehearsal.facts = _priced(facts, subject, cost, forward_ns, backward_ns)
    return rehearsal


@dataclass(slots=True)
class _Logged:
    facts: OpFacts
    forward: Tally
    at_stop: Tally
    output_bytes: int
    backward_flops: int
    differentiable: list[int]


def _logged_run(subject: Subject) -> _Logged:
    leaves, args, kwargs, edges = subject.stand_ins()
    packed: list[torch.Tensor] = []
    at_stop = Tally()
    with AtenLog() as log:

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal at_stop
            packed.append(tensor)
            at_stop = log.tally.copy()
            return tensor.detach()

        with saved_tensors_hooks(pack, _as_it_is):
            out = subject.call(*args, **kwargs)
    results, returned = _results(subject, leaves, out)
    cached = _cached_casts(subject, leaves, log)
    storages = _number_storages(leaves, results, [*packed, *cached])
    saved = tuple(dict.fromkeys(storages[storage_of(tensor)] for tensor in packed))
    hidden = {
        storages[storage_of(tensor)].number: storage_bytes(tensor)
        for tensor in (*packed, *cached)
        if storages[storage_of(tensor)].kind == "hidden"
    }
    shown = tuple(
        Result(
            storage=storages[storage_of(result)],
            storage_bytes=storage_bytes(result),
            gradient_bytes=result.numel() * result.element_size() if result.requires_grad else 0,
            same_as=_argument_that_is(result, subject, leaves, written=False),
            written=_argument_that_is(result, subject, leaves, written=True),
            returned=index < returned,
        )
        for index, result in enumerate(results)
    )
    wrote = {
        storage_of(leaf)
        for leaf, t in zip(leaves, subject.tensors, strict=True)
        if id(t) in subject.written
    }
    output_bytes = sum(
        result.numel() * result.element_size()
        for index, result in enumerate(results)
        if shown[index].storage == ("result", index) or storage_of(result) in wrote
    )
    facts = OpFacts(
        results=shown,
        hidden_bytes=tuple(hidden[index] for index in sorted(hidden)),
        cached=tuple(
            ref.number for ref in (storages[storage_of(t)] for t in cached) if ref.kind == "hidden"
        ),
        saved=saved,
        packs=bool(packed),
        random=log.random,
        holds_tensors=_context_holds_tensors(results),
    )
    forward = log.tally.copy()
    differentiable = [i for i, result in enumerate(results) if result.requires_grad]
    packed.clear()
    cached.clear()
    log.casts.clear()
    torch.clear_autocast_cache()
    fresh, gradients, flops = _logged_backward(subject, results, differentiable, edges)
    facts = replace(facts, fresh_gradient_bytes=fresh, gradients=gradients)
    return _Logged(facts, forward, at_stop, output_bytes, flops, differentiable)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Unpack what was packed detached: a result that its own graph holds is never let go."""
    return tensor


def _cached_casts(
    subject: Subject, leaves: Sequence[torch.Tensor], log: AtenLog
) -> list[torch.Tensor]:
    """Casts that autocast keeps until its block ends: those of float32 leaves that require grad."""
    if not torch.is_autocast_cache_enabled():
        return []
    kept = {
        storage_of(leaf)
        for leaf, tensor in zip(leaves, subject.tensors, strict=True)
        if leaf.requires_grad and id(tensor) in subject.external
    }
    return [
        cast
        for source, cast in log.casts
        if storage_of(source) in kept and source.dtype is torch.float32 is not cast.dtype
    ]


def _results(
    subject: Subject, leaves: Sequence[torch.Tensor], out: Any
) -> tuple[list[torch.Tensor], int]:
    """What an op returns, then what it wrote in place and did not return; how many it returned."""
    results = tensors_in(out)
    returned = {id(result) for result in results}
    unreturned = [
        leaf
        for leaf, tensor in zip(leaves, subject.tensors, strict=True)
        if id(tensor) in subject.written and id(leaf) not in returned
    ]
    return results + unreturned, len(results)


def _argument_that_is(
    result: torch.Tensor, subject: Subject, leaves: Sequence[torch.Tensor], *, written: bool
) -> int | None:
    """The argument that a result is, object for object, among those (not) written in place."""
    for argument, (leaf, tensor) in enumerate(zip(leaves, subject.tensors, strict=True)):
        if result is leaf and (id(tensor) in subject.written) is written:
            return argument
    return None


def _number_storages(
    leaves: Sequence[torch.Tensor], results: Sequence[torch.Tensor], packed: Sequence[torch.Tensor]
) -> dict[int, Ref]:
    storages: dict[int, Ref] = {}
    for index, leaf in enumerate(leaves):
        storages.setdefault(storage_of(leaf), Ref("argument", index))
    for index, result in enumerate(results):
        storages.setdefault(storage_of(result), Ref("result", index))
    hidden = 0
    for tensor in packed:
        if storage_of(tensor) not in storages:
            storages[storage_of(tensor)] = Ref("hidden", hidden)
            hidden += 1
    return storages


def _context_holds_tensors(results: Sequence[torch.Tensor]) -> bool:
    """Whether a custom Function keeps tensors as attributes, where no hook sees them."""
    return any(
        bool(tensors_in(list(vars(result.grad_fn).values())))
        for result in results
        if isinstance(result.grad_fn, torch.autograd.function.BackwardCFunction)
    )


def _logged_backward(
    subject: Subject, results: list[torch.Tensor], differentiable: list[int], edges: list[Any]
) -> tuple[tuple[int, ...], tuple[ArgumentGradient, ...], int]:
    if not differentiable or not any(edge is not None for edge in edges):
        return (), (), 0
    arrived: list[torch.Tensor] = []
    end = _rest(subject, results, differentiable, arrived.extend)
    wanted = [(index, edge) for index, edge in enumerate(edges) if edge is not None]
    with AtenLog() as log:
        got = _differentiate(end, [edge for _, edge in wanted])
    storages = {
        storage_of(gradient): Ref("result", index)
        for index, gradient in zip(differentiable, arrived, strict=True)
    }
    fresh: list[int] = []
    gradients: list[ArgumentGradient] = []
    for (argument, _), gradient in zip(wanted, got, strict=True):
        if gradient is None:
            continue
        if storage_of(gradient) not in storages:
            storages[storage_of(gradient)] = Ref("hidden", len(fresh))
            fresh.append(storage_bytes(gradient))
        gradients.append(
            ArgumentGradient(
                argument=argument,
                source=storages[storage_of(gradient)],
                dense=is_dense(gradient),
                view=gradient._is_view(),
            )
        )
    return tuple(fresh), tuple(gradients), log.tally.flops


def _watched_run(subject: Subject, watch: Meter, differentiable: list[int]) -> bool:
    """Run bare under the meter; say whether a backward was run."""
    leaves, args, kwargs, edges = subject.stand_ins()
    watch.mark(f"{subject.name}.forward")
    out = subject.call(*args, **kwargs)
    watch.mark(f"{subject.name}.forward.end")
    torch.clear_autocast_cache()
    wanted = [edge for edge in edges if edge is not None]
    if not differentiable or not wanted:
        return False
    results, _ = _results(subject, leaves, out)
    end = _rest(subject, results, differentiable, lambda _: watch.mark(f"{subject.name}.backward"))
    del out, results, leaves, args, kwargs
    got = _differentiate(end, wanted)
    watch.mark(f"{subject.name}.backward.end")
    del got
    return True


def _stopped_run(subject: Subject, watch: Meter) -> int:
    """Run forward, marking each tensor that is packed; return how many there were.

    A recomputation that ends in this op ends at the last mark.
    """
    _, args, kwargs, _ = subject.stand_ins()
    packs = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal packs
        packs += 1
        watch.mark(f"{subject.name}.stop.{packs}")
        return tensor.detach()

    watch.mark(f"{subject.name}.stop")
    with saved_tensors_hooks(pack, _as_it_is):
        subject.call(*args, **kwargs)
    torch.clear_autocast_cache()
    return packs


def _dropped_run(subject: Subject, watch: Meter) -> None:
    """Run forward as in a region: what is packed is thrown away at once."""
    _, args, kwargs, _ = subject.stand_ins()
    watch.mark(f"{subject.name}.dropped")
    with saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        subject.call(*args, **kwargs)
    watch.mark(f"{subject.name}.dropped.end")
    torch.clear_autocast_cache()


class _Unpacked(Exception):
    """Backward has asked for something saved: there is no more to see."""


def _unpacked_run(subject: Subject, watch: Meter, differentiable: list[int]) -> bool:
    """Run backward up to where it first asks for something saved; say whether it does."""
    leaves, args, kwargs, edges = subject.stand_ins()

    def unpack(_: torch.Tensor) -> torch.Tensor:
        watch.mark(f"{subject.name}.unpacked")
        raise _Unpacked

    with saved_tensors_hooks(torch.Tensor.detach, unpack):
        out = subject.call(*args, **kwargs)
    torch.clear_autocast_cache()
    wanted = [edge for edge in edges if edge is not None]
    if not differentiable or not wanted:
        return False
    results, _ = _results(subject, leaves, out)
    end = _rest(subject, results, differentiable, lambda _: watch.mark(f"{subject.name}.early"))
    del out, results, leaves, args, kwargs
    try:
        _differentiate(end, wanted)
    except _Unpacked:
        return True
    return False


def _timed_runs(subject: Subject, facts: _Logged) -> tuple[int, int]:
    """Least time of a few runs, in ns: forward, and backward without the seed."""
    forwards, backwards = [], []
    for _ in range(_TIMED_RUNS):
        leaves, args, kwargs, edges = subject.stand_ins()
        clock = _Clock(subject.tensors)
        out = subject.call(*args, **kwargs)
        forwards.append(clock.ns())
        wanted = [edge for edge in edges if edge is not None]
        if not facts.differentiable or not wanted:
            continue
        results, _ = _results(subject, leaves, out)
        clocks: list[_Clock] = []
        end = _rest(
            subject,
            results,
            facts.differentiable,
            lambda _: clocks.append(_Clock(subject.tensors)),  # noqa: B023
        )
        _differentiate(end, wanted)
        backwards.append(clocks[0].ns())
    return min(forwards), min(backwards, default=0)


class _Clock:
    """Wall clock on a CPU, events on a GPU."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._cuda = any(tensor.is_cuda for tensor in tensors)
        if self._cuda:
            self._start = torch.cuda.Event(enable_timing=True)
            self._start.record()
        self._wall = time.perf_counter_ns()

    def ns(self) -> int:
        """Nanoseconds since the clock was made."""
        if not self._cuda:
            return time.perf_counter_ns() - self._wall
        stop = torch.cuda.Event(enable_timing=True)
        stop.record()
        stop.synchronize()
        return round(float(self._start.elapsed_time(stop)) * 1e6)


def _priced(
    logged: _Logged,
    subject: Subject,
    cost: Callable[[OpWork], int],
    forward_ns: int,
    backward_ns: int,
) -> OpFacts:
    target, forward, at_stop = subject.target, logged.forward, logged.at_stop
    full = cost(
        OpWork(
            target=target,
            flops=forward.flops,
            output_bytes=logged.output_bytes,
            measured_ns=forward_ns,
        )
    )
    # Until its last pack an op has done this share of its work; nothing if it packs inputs only.
    share = _share(at_stop, forward)
    stopped = min(full, round(full * share))
    backward = cost(
        OpWork(
            target=target + " backward",
            flops=logged.backward_flops,
            output_bytes=sum(logged.facts.fresh_gradient_bytes),
            measured_ns=backward_ns,
        )
    )
    return replace(
        logged.facts,
        cost=full,
        stop_cost=stopped,
        backward_cost=backward if logged.facts.gradients else 0,
        flops=forward.flops,
        stop_flops=at_stop.flops,
        backward_flops=logged.backward_flops,
    )


def _share(done: Tally, total: Tally) -> float:
    if done.calls == 0:
        return 0.0
    if total.flops:
        return done.flops / total.flops if done.flops else done.calls / total.calls
    return done.nbytes / total.nbytes if total.nbytes else 1.0
