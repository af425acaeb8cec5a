"""From the stream of calls to the final graph."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autockpt.capture.bits import storage_id
from autockpt.capture.guards import expect
from autockpt.capture.paths import read_path


def finish(
    graph: fx.Graph,
    outputs: tuple[Any, ...],
    model: torch.nn.Module,
    *,
    in_order: bool = False,
) -> tuple[fx.Graph, str]:
    """Drop what nobody reads of multi-output calls, close the graph, and sign it.

    Counters (``num_batches_tracked.add_(1)``) go to the end of the model's stage, where they
    do not stand between the ops of a region.

    Parameters
    ----------
    graph : fx.Graph
        As recorded; changed in place.
    outputs : tuple
        Argument of the output node.
    model : torch.nn.Module
        Where ``get_attr`` nodes read.
    in_order : bool
        Whether counters stay where they are.

    Returns
    -------
    graph : fx.Graph
    signature : str
        Digest of the stream of calls, sizes aside.
    """
    graph.output(outputs)
    for node in reversed(list(graph.nodes)):
        unread = not node.users
        if unread and (node.op == "get_attr" or (node.target is operator.getitem and _picks(node))):
            graph.erase_node(node)
    if not in_order:
        _move_counters(graph, model)
    graph.lint()
    return graph, sign(graph)


def _move_counters(graph: fx.Graph, model: torch.nn.Module) -> None:
    counters: list[fx.Node] = []
    others: set[int | None] = set()
    for node in graph.nodes:
        reads = [_storage(n, model) for n in node.all_input_nodes if is_read(n)]
        if _is_counter(node):
            counters.append(node)
        else:
            others.update(reads)
    end = next(n for n in graph.nodes if n.op == "output" or n.meta["stage"] == "loss")
    for node in counters:
        sources = node.all_input_nodes
        if not others.intersection(_storage(n, model) for n in sources):
            for moved in (*sources, node):
                end.prepend(moved)
                moved.meta["calls"] = ()


def _is_counter(node: fx.Node) -> bool:
    """Tell a call that writes tensors of the module, reads nothing else, and is not read."""
    sources = node.all_input_nodes
    return (
        node.op in ("call_function", "call_method")
        and bool(node.meta["writes"])
        and not node.users
        and node.meta["stage"] == "model"
        and all(n.op == "get_attr" and len(n.users) == 1 for n in sources)
    )


def is_read(node: fx.Node) -> bool:
    """Whether a node reads the live module (a tensor that the loss holds is not read again)."""
    return node.op == "get_attr" and node.meta["kind"] != "closure"


def _storage(node: fx.Node, model: torch.nn.Module) -> int | None:
    return storage_id(read_path(model, str(node.target)))


def _picks(node: fx.Node) -> bool:
    # A getitem of ours takes a result out of a call that returned several.
    source = node.args[0]
    return isinstance(source, fx.Node) and bool(source.meta.get("several"))


def sign(graph: fx.Graph) -> str:
    """Digest of the calls of a graph and of how they hang together, sizes aside."""
    numbers: dict[fx.Node, int] = {}
    digest = hashlib.sha256()
    for number, node in enumerate(graph.nodes):
        numbers[node] = number
        parts = (node.op, _name(node.target), _shape_free((node.args, node.kwargs), numbers))
        if node.target is expect:
            parts = (node.op, "expect", _shape_free(node.args[:2], numbers))
        digest.update(repr(parts).encode())
    return digest.hexdigest()


def _name(target: str | Callable[..., Any]) -> str:
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"


def _shape_free(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if isinstance(value, (tuple, list)):
        return tuple(_shape_free(item, numbers) for item in value)
    if isinstance(value, dict):
        return tuple((key, _shape_free(item, numbers)) for key, item in value.items())
    if isinstance(value, slice):
        return _shape_free((value.start, value.stop, value.step), numbers)
    if isinstance(value, int) and not isinstance(value, bool):
        return "#"
    if value is None or isinstance(value, (bool, float, complex, str)):
        return repr(value)
    return str(value) if not callable(value) else _name(value)
