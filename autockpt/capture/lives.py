"""How long the model's own Python holds on to its tensors.

An emitted forward lets go of a value after its last use. A function that a person wrote holds its
arguments and local names until it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

Death = tuple[fx.Node, fx.Node, tuple[int, ...]]
"""The node that made a tensor, the last op when it died, and the module calls under way then."""


def hold(*_: Any) -> None:
    """Do nothing, at the place where Python lets go of some tensors: a use that keeps them."""


def add_holds(graph: fx.Graph, deaths: Sequence[Death]) -> None:
    """Let values live in a graph as long as they did when it was recorded.

    Parameters
    ----------
    graph : fx.Graph
        Closed; changed in place.
    deaths : sequence
        As ``Stream.deaths``.

    Notes
    -----
    A tensor that was made before a module was called and died inside it is left alone: a use
    in there would make it an argument.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    places: dict[tuple[fx.Node, tuple[int, ...]], dict[fx.Node, None]] = {}
    for node, last, calls in deaths:
        if node not in order or last not in order or node.meta["calls"][: len(calls)] != calls:
            continue
        used = max((order[user] for user in node.users), default=order[node])
        if used < order[last]:
            places.setdefault((last, calls), {})[node] = None
    # Of several places behind one op the outermost calls end last.
    for (last, calls), held in sorted(places.items(), key=lambda item: len(item[0][1])):
        with graph.inserting_after(last):
            made = graph.call_function(hold, tuple(held))
        made.meta.update(last.meta, calls=calls, writes=(), tensors=(), draws=False)
