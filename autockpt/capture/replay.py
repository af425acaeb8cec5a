"""Run a captured graph call by call on the live module: slow, simple, for checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autockpt.capture.captured import Capture
from autockpt.capture.paths import read_path

Visitor = Callable[[fx.Node, Any], None]


def replay(
    capture: Capture,
    model: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    *,
    loss: bool = False,
    closures: Mapping[str, torch.Tensor] | None = None,
    visit: Visitor | None = None,
) -> tuple[Any, ...]:
    """Run the recorded calls again.

    Parameters
    ----------
    capture : Capture
    model : torch.nn.Module
        Where parameters, buffers and attributes are read.
    tensors : sequence of Tensor
        The placeholders, as `Inputs.tensors` finds them.
    loss : bool
        Whether to run the loss outside the model as well; it is then the last result.
    closures : mapping, optional
        ``Recorded.closures``: tensors that the loss holds.
    visit : callable, optional
        Called with each node that computes and its value.

    Returns
    -------
    tuple of Tensor
        The model's outputs in template order (and the loss).

    Raises
    ------
    GuardMiss
        If a guard's answer differs from the recorded one.
    """
    values: dict[fx.Node, Any] = {}
    feed = iter(tensors)
    last_use = _last_uses(capture.graph)
    results: tuple[Any, ...] = ()
    for node in capture.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(feed)
        elif node.op == "get_attr" and node.meta["kind"] == "closure":
            values[node] = (closures or {}).get(node.target)
        elif node.op == "get_attr":
            values[node] = read_path(model, node.target)
        elif node.op == "output":
            outputs, scalar = node.args[0]
            results = tuple(values[n] for n in outputs)
            results += (values[scalar],) if loss else ()
        elif loss or node.meta["stage"] == "model":
            with node.meta["ambient"].enter():
                values[node] = _call(node, values)
            if visit is not None:
                visit(node, values[node])
        for dead in last_use.get(node, ()):
            values.pop(dead, None)
    return results


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args: Any = fx.node.map_arg(node.args, values.__getitem__)
    kwargs: Any = fx.node.map_arg(node.kwargs, values.__getitem__)
    # map_arg makes immutable lists; some calls insist on plain ones.
    args, kwargs = _plain(args), _plain(kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Any = node.target
    return function(*args, **kwargs)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if type(value) is tuple:
        return tuple(_plain(item) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Find what may be let go after each node."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        for source in node.all_input_nodes:
            last[source] = node
    found: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last.items():
        found.setdefault(user, []).append(node)
    return found
