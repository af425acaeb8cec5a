"""Autograd's record of a forward, compared node by node."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch


def graph_difference(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> str:
    """Find the first place where two autograd graphs differ, or return an empty string.

    Nodes are compared by name, by what they lead to, and at the leaves by the parameter.
    """
    pending: list[tuple[Any, Any]] = [
        (a.grad_fn, b.grad_fn) for a, b in zip(left, right, strict=True)
    ]
    seen: dict[Any, Any] = {}
    while pending:
        a, b = pending.pop()
        if a is None or b is None:
            if a is not b:
                return f"{_name(a)} in the model's graph is {_name(b)} in the captured one"
            continue
        if a in seen:
            if seen[a] is not b:
                return f"{_name(a)} is shared in one autograd graph only"
            continue
        seen[a] = b
        ends = [(n, i) for n, i in a.next_functions], [(n, i) for n, i in b.next_functions]
        if a.name() != b.name() or [i for _, i in ends[0]] != [i for _, i in ends[1]]:
            return f"{_name(a)} in the model's graph is {_name(b)} in the captured one"
        leaf = getattr(a, "variable", None)
        if isinstance(leaf, torch.nn.Parameter) and leaf is not b.variable:
            return f"a gradient goes to another parameter of shape {tuple(leaf.shape)}"
        pending += [(x, y) for (x, _), (y, _) in zip(*ends, strict=True)]
    return ""


def leaf_order(output: torch.Tensor) -> list[torch.Tensor]:
    """Give the leaves in the order in which a backward pass hands them gradients.

    Where leaves are one tensor after all, that is the order of a sum, of which the last bit may
    depend on it. Autograd runs what was made last first, of all that has its gradients.
    """
    root: Any = output.grad_fn
    waiting: Counter[Any] = Counter()
    found, pending = {root}, [root]
    while pending:
        for node, _ in pending.pop().next_functions:
            waiting[node] += 1
            if node is not None and node not in found:
                found.add(node)
                pending.append(node)
    leaves: list[torch.Tensor] = []
    ready = [_turn(root)]
    while ready:
        for reached, _ in heapq.heappop(ready)[-1].next_functions:
            waiting[reached] -= 1
            if hasattr(reached, "variable"):
                leaves.append(reached.variable)
            elif reached is not None and not waiting[reached]:
                heapq.heappush(ready, _turn(reached))
    return leaves


def _turn(node: Any) -> tuple[int, int, Any]:
    return -node._sequence_nr(), id(node), node


def _name(node: Any) -> str:
    return "no gradient" if node is None else str(node.name())
