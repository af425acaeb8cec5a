"""One run of an op under a dispatch mode: what it makes, saves, draws, and its FLOPs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from autockpt.profiler.aten_log import AtenLog, Tally
from autockpt.profiler.facts import ArgumentGradient, OpFacts, Ref, Result
from autockpt.profiler.subject import Subject, differentiate, rest, results_of
from autockpt.profiler.tensors import is_dense, settled, storage_bytes, storage_of, tensors_in


@dataclass(slots=True)
class Logged:
    """What the run has shown; tallies of its forward, and of that until the last pack."""

    facts: OpFacts
    forward: Tally
    at_stop: Tally
    output_bytes: int
    backward_flops: int
    differentiable: list[int]


def logged_run(subject: Subject) -> Logged:
    """Run forward and backward once, every ATen call logged."""
    leaves, args, kwargs, edges = subject.stand_ins()
    packed: list[torch.Tensor] = []
    given = {storage_of(leaf) for leaf in leaves}
    at_stop = Tally()
    asked: list[int] = []
    with AtenLog() as log:

        def pack(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
            nonlocal at_stop
            packed.append(tensor)
            at_stop = log.tally.copy()
            if tensor.layout is torch.strided and storage_of(tensor) not in given:
                log.packed.append(tensor)
            asked.append(0)
            return len(asked) - 1, tensor.detach()

        def unpack(saved: tuple[int, torch.Tensor]) -> torch.Tensor:
            number, tensor = saved
            asked[number] += 1
            return tensor

        with saved_tensors_hooks(pack, unpack):
            out = subject.call(*args, **kwargs)
    results, returned = results_of(subject, leaves, out)
    cached = _cached_casts(subject, leaves, log)
    held = _context_tensors(results)
    number_bytes = _number_bytes(results, leaves, packed)
    # That looked at what is saved: what backward asks for is counted from here.
    asked[:] = [0] * len(asked)
    storages = _number_storages(leaves, results, [*packed, *cached, *held])
    saved = tuple(dict.fromkeys(storages[storage_of(tensor)] for tensor in (*packed, *held)))
    hidden = {
        storages[storage_of(tensor)].number: storage_bytes(tensor)
        for tensor in (*packed, *cached, *held)
        if storages[storage_of(tensor)].kind == "hidden"
    }
    shown = tuple(
        Result(
            storage=storages[storage_of(result)],
            storage_bytes=storage_bytes(result),
            gradient_bytes=result.numel() * result.element_size() if has_gradient(result) else 0,
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
        context=tuple(dict.fromkeys(storages[storage_of(tensor)] for tensor in held)),
        packs_unfilled=bool(log.filled),
        number_bytes=number_bytes,
    )
    forward = log.tally.copy()
    differentiable = [i for i, result in enumerate(results) if has_gradient(result)]
    packed.clear()
    held.clear()
    log.packed.clear()
    log.filled.clear()
    cached.clear()
    log.casts.clear()
    torch.clear_autocast_cache()
    fresh, gradients, flops = _logged_backward(subject, results, differentiable, edges)
    facts = replace(
        facts,
        fresh_gradient_bytes=fresh,
        gradients=gradients,
        asks_again=max(asked, default=0) > 1,
    )
    return Logged(facts, forward, at_stop, output_bytes, flops, differentiable)


def has_gradient(result: torch.Tensor) -> bool:
    """Whether a result gets a gradient: under no_grad a view of a leaf says so and gets none."""
    return result.requires_grad and torch.is_grad_enabled()


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


def _context_tensors(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Give what a custom Function keeps as attributes of its context, where no hook sees it."""
    return [
        tensor
        for result in results
        if isinstance(result.grad_fn, torch.autograd.function.BackwardCFunction)
        for tensor in tensors_in(list(vars(result.grad_fn).values()))
        if tensor.layout is torch.strided
    ]


def _number_bytes(
    results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], packed: Sequence[torch.Tensor]
) -> int:
    """Bytes of the Python numbers that autograd saves as tensors, which no hook is handed.

    They lie on the CPU, and are counted where the op runs there too.
    """
    known = {storage_of(tensor) for tensor in (*leaves, *packed, *results)}
    pending: list[Any] = [r.grad_fn for r in results if r.device.type == "cpu"]
    met: set[Any] = {None}
    numbers: dict[int, int] = {}
    while pending:
        node = pending.pop()
        if node in met:
            continue
        met.add(node)
        pending += [behind for behind, _ in node.next_functions]
        for saved in _saved_by(node):
            if saved.layout is torch.strided and not saved.dim():
                numbers[storage_of(saved)] = storage_bytes(saved)
    return sum(nbytes for storage, nbytes in numbers.items() if storage not in known)


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        with contextlib.suppress(RuntimeError):  # what was written to since
            saved = getattr(node, name)
            if isinstance(saved, torch.Tensor):
                yield saved


def _logged_backward(
    subject: Subject, results: list[torch.Tensor], differentiable: list[int], edges: list[Any]
) -> tuple[tuple[int, ...], tuple[ArgumentGradient, ...], int]:
    if not differentiable or not any(edge is not None for edge in edges):
        return (), (), 0
    arrived: list[torch.Tensor] = []
    end = rest(subject, results, differentiable, arrived.extend)
    wanted = [(index, edge) for index, edge in enumerate(edges) if edge is not None]
    with AtenLog() as log:
        got = differentiate(end, [edge for _, edge in wanted])
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
                strides=_strides(gradient),
            )
        )
    return tuple(fresh), tuple(gradients), log.tally.flops


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return settled(tensor.shape, tensor.stride()) if tensor.layout is torch.strided else None
