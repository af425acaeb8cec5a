"""What each region reads, returns and lets die: liveness over a graph and a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
        Values from outside that it uses, in order of first use; what a prologue makes again
        aside, what it reads for that included.
    returns : tuple of fx.Node
        Values defined inside that are used outside, in program order.
    prologue : Scope or None
        The ops that run before it on recomputation; ``returns`` are the values that it reads
        from them, which it is handed in forward but does not hold.
    kept : tuple of int
        Its ops that run once.
    idle : collection of int
        Its ops, those in whole regions inside it included, of which a recomputation needs no
        result.
    """

    start: int
    stop: int
    items: tuple[int | Scope, ...]
    reads: tuple[fx.Node, ...]
    returns: tuple[fx.Node, ...]
    prologue: Scope | None = None
    kept: tuple[int, ...] = ()
    idle: Collection[int] = ()

    @property
    def handed(self) -> tuple[fx.Node, ...]:
        """Values that a call of it takes: what it holds, and what it can make again."""
        return self.reads if self.prologue is None else (*self.reads, *self.prologue.returns)

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


def written_statistics(node: fx.Node) -> list[fx.Node]:
    """Give the tensors of the module that an op writes."""
    return [written for written in node.meta.get("writes", ()) if written.op == "get_attr"]


def scopes(
    ops: Sequence[fx.Node],
    emitted: int,
    outputs: Sequence[fx.Node],
    plan: Plan,
    idle: Mapping[Region, Collection[int]],
) -> Scope:
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
    builder = _Builder(ops, emitted, outputs, idle)
    for region in plan.regions:
        builder.read_again(region)
    return builder.scope(0, emitted, plan.regions)


class _Builder:
    def __init__(
        self,
        ops: Sequence[fx.Node],
        emitted: int,
        outputs: Sequence[fx.Node],
        idle: Mapping[Region, Collection[int]],
    ) -> None:
        self._ops = ops
        self._idle = idle
        self._index = {node: i for i, node in enumerate(ops)}
        self._last_use = dict.fromkeys(outputs, emitted)
        for i, op in enumerate(ops[:emitted]):
            for node in op.all_input_nodes:
                self._last_use[node] = max(self._last_use.get(node, 0), i)

    def read_again(self, region: Region) -> None:
        """A region takes what its prologue reads: whoever made it has to return it."""
        for node in self._reads(region.prologue):
            self._last_use[node] = max(self._last_use.get(node, 0), region.start)

    def scope(self, start: int, stop: int, regions: Sequence[Region]) -> Scope:
        items: list[int | Scope] = []
        position = start
        for region in regions:
            items.extend(range(position, region.start))
            inner = self.scope(region.start, region.stop, region.children)
            inner = replace(inner, kept=region.kept, idle=self._idle.get(region, ()))
            items.append(self._with_prologue(inner, region.prologue))
            position = region.stop
        items.extend(range(position, stop))
        returns = tuple(op for op in self._ops[start:stop] if self._last_use.get(op, -1) >= stop)
        return Scope(
            start=start,
            stop=stop,
            items=tuple(items),
            reads=self._reads(range(start, stop)),
            returns=returns,
        )

    def _reads(self, inside: Sequence[int]) -> tuple[fx.Node, ...]:
        own = {self._ops[i] for i in inside}
        reads = dict.fromkeys(
            node
            for i in inside
            for node in self._ops[i].all_input_nodes
            if not is_live_read(node) and node not in own
        )
        return tuple(reads)

    def _with_prologue(self, scope: Scope, prologue: tuple[int, ...]) -> Scope:
        if not prologue:
            return scope
        made = {self._ops[i] for i in prologue}
        again = Scope(
            start=prologue[0],
            stop=prologue[-1] + 1,
            items=prologue,
            reads=self._reads(prologue),
            returns=tuple(node for node in scope.reads if node in made),
        )
        held = dict.fromkeys(node for node in scope.reads if node not in made)
        return replace(scope, reads=tuple(held | dict.fromkeys(again.reads)), prologue=again)


def deaths(scope: Scope, ops: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """For each item of a scope, the values defined in the scope that nobody uses after it."""
    defined: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    if scope.prologue is not None:
        defined.update((node, 0) for node in scope.prologue.returns)
    for position, item in enumerate(scope.items):
        for node in item.returns if isinstance(item, Scope) else (ops[item],):
            defined[node] = position
        for node in item.handed if isinstance(item, Scope) else ops[item].all_input_nodes:
            last[node] = position
    dying: list[list[fx.Node]] = [[] for _ in scope.items]
    kept = set(scope.returns)
    for node in defined:
        if node in last and node not in kept:
            dying[last[node]].append(node)
    return dying
