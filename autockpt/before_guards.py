"""What a forward writes before it asks its last guard: put back where that guard misses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autockpt.capture import Capture, TensorMeta
from autockpt.capture.guards import is_guard
from autockpt.lower import op_nodes
from solvers.problem import Problem


def written_before_guards(nodes: Sequence[fx.Node], problem: Problem) -> tuple[fx.Node, ...]:
    """Return what was there before the step and may be written before its last guard.

    Parameters
    ----------
    nodes : sequence of fx.Node
        The computing nodes, as the ops of ``problem``.
    problem : Problem

    Returns
    -------
    tuple of fx.Node
        Of the batch and of the model. What is written through a view is among them, and so is
        what was read beside it where that view was made.
    """
    last = max((i for i, node in enumerate(nodes) if _is_emitted_guard(node)), default=-1)
    index = {node: i for i, node in enumerate(nodes)}
    pending = [a for node in nodes[: last + 1] for a in node.meta.get("writes", ())]
    seen: dict[fx.Node, None] = {}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen[node] = None
        if node in index and _shows_what_was_there(index[node], problem):
            pending += node.all_input_nodes
    return tuple(
        node
        for node in seen
        if node.op in ("placeholder", "get_attr") and node.meta.get("kind") != "closure"
    )


def _is_emitted_guard(node: fx.Node) -> bool:
    return is_guard(node) and node.meta["stage"] == "model"


def _shows_what_was_there(op: int, problem: Problem) -> bool:
    storages = (problem.values[value].storage for value in problem.ops[op].outputs)
    return any(problem.storages[storage].producer is None for storage in storages)


def with_copies(capture: Capture, problem: Problem) -> Problem:
    """Return the problem of the emitted forward, which holds copies of these while it runs.

    Where there are guards it holds the random state too, whatever is written.
    """
    nodes = op_nodes(capture.graph)
    if not any(map(_is_emitted_guard, nodes)):
        return problem
    metas: list[TensorMeta] = [
        node.meta["tensors"][0] for node in written_before_guards(nodes, problem)
    ]
    written = sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in metas)
    return replace(problem, forward_bytes=written + problem.random_state_bytes)
