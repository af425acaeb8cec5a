"""Looking up modules once: each attribute on the way to a parameter takes half a microsecond."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import fx

from autockpt.rewrite.expressions import Renderer
from autockpt.rewrite.scopes import is_live_read


class Lookups:
    """The variables of one function that hold modules.

    A module of which an op reads several tensors gets one, and so does an item of a list of
    modules, a layer, under which more than one module is read from here on.

    Parameters
    ----------
    renderer : Renderer
    ops : sequence of fx.Node
        What the function runs, in order.
    """

    def __init__(self, renderer: Renderer, ops: Iterable[fx.Node]) -> None:
        self._renderer = renderer
        self._held: dict[str, str] = {}
        self._to_come: Counter[str] = Counter()
        for op in ops:
            self._to_come.update(self._layers(_owners(op)))

    def before(self, op: fx.Node) -> list[str]:
        """Give the statements that look up what an op needs, if they are worth it."""
        owners = _owners(op)
        lines = []
        layers = self._layers(owners)
        for layer in dict.fromkeys(layers):
            if self._to_come[layer] > 1:
                lines += self._hold(layer, self._renderer.layer_variable(layer))
        for owner, reads in owners.items():
            if reads > 1 and owner not in self._held:
                lines += self._hold(owner, self._renderer.variable(owner))
        self._to_come.subtract(layers)
        return lines

    def texts(self, op: fx.Node) -> dict[fx.Node, str]:
        """Say how an op reads what it reads on the live module, after those statements."""
        return {node: self._path(str(node.target)) for node in op.all_input_nodes if _plain(node)}

    def _layers(self, owners: dict[str, int]) -> list[str]:
        """Give the layers above the tensors that are read, outer ones first, one a lookup."""
        return [
            layer
            for owner, reads in owners.items()
            for layer in self._renderer.layers(owner)
            for _ in range(reads if layer == owner else 1)
        ]

    def _hold(self, path: str, variable: str) -> list[str]:
        if self._held.get(path) == variable:
            return []
        text = self._path(path)
        self._held = {other: name for other, name in self._held.items() if name != variable}
        self._held[path] = variable
        return [f"{variable} = {text}"]

    def _path(self, target: str) -> str:
        parts = target.split(".")
        for length in range(len(parts), 0, -1):
            variable = self._held.get(".".join(parts[:length]))
            if variable is not None:
                return self._renderer.path(target, (parts[:length], variable))
        return self._renderer.path(target)


def _owners(op: fx.Node) -> dict[str, int]:
    """Count the tensors that an op reads of each module."""
    targets = dict.fromkeys(str(node.target) for node in op.all_input_nodes if _plain(node))
    return dict(Counter(owner for t in targets if (owner := t.rpartition(".")[0])))


def _plain(node: fx.Node) -> bool:
    return is_live_read(node) and "[" not in str(node.target)
