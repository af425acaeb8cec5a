"""Liveness of a problem's storages: what every solver and the judge look up."""

from __future__ import annotations

from dataclasses import dataclass

from solvers.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Tables derived from a problem once.

    Only storages that an op produces are tracked; the others are part of the fixed bytes.

    Attributes
    ----------
    size : int
        Number of ops.
    nbytes, producer : tuple of int
        Per storage; producer is -1 for what was there before.
    produced : tuple of tuple of int
        Per op, the storages that it allocates.
    last_use : tuple of int
        Per storage, the last op that reads it; ``size`` if the caller holds it.
    first_read : tuple of int
        Per storage, the first op after its producer that reads it; ``size`` if none.
    reads, saved : tuple of tuple of int
        Per op, tracked storages of earlier ops that it reads; tracked storages that it saves.
    copied : tuple of tuple of int
        Per op, untracked storages that a replay makes copies of.
    earliest_input : tuple of int
        Per op, the least index of an op that defines one of its inputs, parameters aside; -1
        for what was there before, ``size`` without such inputs.
    packs : tuple of bool
        Whether autograd saves something for the op.
    reached : tuple of bool
        Whether its backward runs when the loss is differentiated.
    release : tuple of int or None
        Per op, when what autograd saved for it is let go: the op itself (its backward), -1
        (never in this step: its graph hangs on an output of the problem), or None where
        nothing is held by the time forward ends.
    graph_end : tuple of int
        Per op, the forward instant at which its part of the graph dies if nothing reaches it.
    outputs : tuple of int
        Tracked storages that the caller holds, the loss included.
    """

    size: int
    nbytes: tuple[int, ...]
    producer: tuple[int, ...]
    produced: tuple[tuple[int, ...], ...]
    last_use: tuple[int, ...]
    first_read: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    saved: tuple[tuple[int, ...], ...]
    copied: tuple[tuple[int, ...], ...]
    earliest_input: tuple[int, ...]
    packs: tuple[bool, ...]
    reached: tuple[bool, ...]
    release: tuple[int | None, ...]
    graph_end: tuple[int, ...]
    outputs: tuple[int, ...]


def make_graph(problem: Problem) -> Graph:
    """Derive the liveness tables of ``problem``. Time is linear in its size."""
    size = len(problem.ops)
    producer = tuple(-1 if s.producer is None else s.producer for s in problem.storages)
    produced: list[list[int]] = [[] for _ in problem.ops]
    for storage, op_index in enumerate(producer):
        if op_index >= 0:
            produced[op_index].append(storage)
    saved = tuple(
        tuple(dict.fromkeys(s for s in op.saved if producer[s] >= 0)) for op in problem.ops
    )
    reads = _reads(problem, producer, saved)
    outputs = tuple(
        dict.fromkeys(
            problem.values[v].storage
            for v in (*problem.outputs, problem.loss)
            if producer[problem.values[v].storage] >= 0
        )
    )
    first_read = [size] * len(producer)
    last_use = list(producer)
    for index, storages in enumerate(reads):
        for storage in storages:
            first_read[storage] = min(first_read[storage], index)
            last_use[storage] = max(last_use[storage], index)
    for storage in problem.forward_held:
        last_use[storage] = max(last_use[storage], size - 1)
    for storage in outputs:
        last_use[storage] = size
    packs = tuple(op.packs or bool(op.saved) for op in problem.ops)
    reached = reached_ops(problem)
    graph_end = _graph_end(problem)
    return Graph(
        size=size,
        nbytes=tuple(s.nbytes for s in problem.storages),
        producer=producer,
        produced=tuple(tuple(storages) for storages in produced),
        last_use=tuple(last_use),
        first_read=tuple(first_read),
        reads=reads,
        saved=saved,
        copied=tuple(op.copied for op in problem.ops),
        earliest_input=_earliest_inputs(problem),
        packs=packs,
        reached=reached,
        release=tuple(
            _release(index, packs[index], reached[index], graph_end[index] >= size)
            for index in range(size)
        ),
        graph_end=graph_end,
        outputs=outputs,
    )


def _release(index: int, packs: bool, reached: bool, on_output: bool) -> int | None:
    if not packs:
        return None
    if reached:
        return index
    return -1 if on_output else None


def _reads(
    problem: Problem, producer: tuple[int, ...], saved: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    reads = []
    for index, op in enumerate(problem.ops):
        storages = dict.fromkeys(problem.values[v].storage for v in op.inputs)
        storages.update(dict.fromkeys(saved[index]))
        reads.append(tuple(s for s in storages if 0 <= producer[s] < index))
    return tuple(reads)


def defining_ops(problem: Problem) -> list[int]:
    """Return, per value, the op that defines it; -1 for what was there before."""
    definers = [-1] * len(problem.values)
    for index, op in enumerate(problem.ops):
        for value in op.outputs:
            definers[value] = index
    return definers


def _earliest_inputs(problem: Problem) -> tuple[int, ...]:
    definers = defining_ops(problem)
    size = len(problem.ops)
    return tuple(
        min((definers[v] for v in op.inputs if not problem.values[v].parameter), default=size)
        for op in problem.ops
    )


def reached_ops(problem: Problem) -> tuple[bool, ...]:
    """Tell, per op, whether its backward runs when the loss is differentiated."""
    has_gradient = [False] * len(problem.values)
    has_gradient[problem.loss] = True
    reached = [False] * len(problem.ops)
    for index in range(len(problem.ops) - 1, -1, -1):
        op = problem.ops[index]
        differentiable = bool(op.gradients) or op.packs or bool(op.saved)
        if not differentiable or not any(has_gradient[v] for v in op.outputs):
            continue
        reached[index] = True
        for gradient in op.gradients:
            if gradient.source >= 0 or has_gradient[op.outputs[~gradient.source]]:
                has_gradient[gradient.value] = True
    return tuple(reached)


def _graph_end(problem: Problem) -> tuple[int, ...]:
    """Return when each op's node of the autograd graph dies, if backward never reaches it.

    A node lives as long as a tensor that it, or a node that leads to it, has made.
    """
    end_of_value = defining_ops(problem)
    for index, op in enumerate(problem.ops):
        for v in op.inputs:
            end_of_value[v] = index
    for v in (*problem.outputs, problem.loss):
        end_of_value[v] = len(problem.ops)
    ends = [0] * len(problem.ops)
    for index in range(len(problem.ops) - 1, -1, -1):
        op = problem.ops[index]
        ends[index] = max((end_of_value[v] for v in op.outputs), default=index)
        for gradient in op.gradients:
            end_of_value[gradient.value] = max(end_of_value[gradient.value], ends[index])
    return tuple(ends)
