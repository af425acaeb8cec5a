"""What each region reads, returns and lets die: liveness over a graph and a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from solvers.errors import PlanError
from solvers.plan import Plan, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The body of one emitted function: the forward, or a region.

    Attributes
    ----------
    start, stop : int
        Ops ``start <= i < stop``.
    items : tuple of (int or Scope)
        In program order: an op that runs here, or the region that is called here.
    reads : tuple of fx.Node
        Values from outside that it uses, in order of first use.
    returns : tuple of fx.Node
        Values defined inside that are used outside, in program order.
    """

    start: int
    stop: int
    items: tuple[int | Scope, ...]
    reads: tuple[fx.Node, ...]
    returns: tuple[fx.Node, ...]

    def walk(self) -> Iterator[Scope]:
        """Yield this scope and all scopes inside it, innermost first."""
        for item in self.items:
            if isinstance(item, Scope):
                yield from item.walk()
        yield self


def is_live_read(node: fx.Node) -> bool:
    """Tell whether a value is looked up on the live module at each use.

    A tensor in a plain attribute is not: it may be another one by the time of the
    recomputation, so regions take it as an argument.
    """
    return node.op == "get_attr" and node.meta.get("kind") != "attribute"


def scopes(ops: Sequence[fx.Node], emitted: int, outputs: Sequence[fx.Node], plan: Plan) -> Scope:
    """Nest the first ``emitted`` ops as the plan says; the outermost scope is the forward.

    Raises
    ------
    PlanError
        A region reaches past the ops that are emitted.
    """
    for region in plan.regions:
        if region.stop > emitted:
            raise PlanError(
                f"region [{region.start}, {region.stop}) reaches into the loss outside the "
                f"model, which starts at op {emitted}: end it there."
            )
    builder = _Builder(ops, emitted, outputs)
    return builder.scope(0, emitted, plan.regions)


class _Builder:
    def __init__(self, ops: Sequence[fx.Node], emitted: int, outputs: Sequence[fx.Node]) -> None:
        self._ops = ops
        self._index = {node: i for i, node in enumerate(ops)}
        self._last_use = dict.fromkeys(outputs, emitted)
        for i, op in enumerate(ops[:emitted]):
            for node in op.all_input_nodes:
                self._last_use[node] = max(self._last_use.get(node, 0), i)

    def scope(self, start: int, stop: int, regions: Sequence[Region]) -> Scope:
        items: list[int | Scope] = []
        position = start
        for region in regions:
            items.extend(range(position, region.start))
            items.append(self.scope(region.start, region.stop, region.children))
            position = region.stop
        items.extend(range(position, stop))
        inside = self._ops[start:stop]
        reads = dict.fromkeys(
            node
            for op in inside
            for node in op.all_input_nodes
            if not is_live_read(node) and not start <= self._index.get(node, -1) < stop
        )
        returns = tuple(op for op in inside if self._last_use.get(op, -1) >= stop)
        return Scope(
            start=start, stop=stop, items=tuple(items), reads=tuple(reads), returns=returns
        )


def deaths(scope: Scope, ops: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """For each item of a scope, the values defined in the scope that nobody uses after it."""
    defined: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    for position, item in enumerate(scope.items):
        for node in item.returns if isinstance(item, Scope) else (ops[item],):
            defined[node] = position
        for node in item.reads if isinstance(item, Scope) else ops[item].all_input_nodes:
            last[node] = position
    dying: list[list[fx.Node]] = [[] for _ in scope.items]
    kept = set(scope.returns)
    for node in defined:
        if node in last and node not in kept:
            dying[last[node]].append(node)
    return dying
