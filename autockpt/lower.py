"""Lower a capture and its profile to a Problem: the border between torch and the solvers.

Op ``i`` of the problem is the ``i``-th computing node of the graph (``op_nodes``): guards and
the nodes that unpack several results are ops too, without bytes or cost, so that positions in
a plan are positions in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import fx

from autockpt.capture import Capture
from autockpt.capture.guards import expect
from autockpt.profiler import External, OpFacts, Profile, target_name
from autockpt.profiler.facts import Ref, Result
from solvers.problem import Gradient, Op, Problem, Storage, Value

# torch.get_rng_state() on a CPU: what checkpoint keeps for a region that draws.
_CPU_RANDOM_STATE_BYTES = 5056


def op_nodes(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The computing nodes of a graph, in program order."""
    return tuple(node for node in graph.nodes if node.op in ("call_function", "call_method"))


def lower(capture: Capture, profile: Profile, *, undone: bool = False) -> Problem:
    """Compose per-op facts to one problem.

    Parameters
    ----------
    capture : Capture
    profile : Profile
    undone : bool
        Whether writes to buffers are undone when a region runs again, so that they may be in one.

    Notes
    -----
    Storages follow aliases through the graph, gradients follow values, and stretches that
    write a storage in place are made uncuttable. Linear in the size of the graph.
    """
    table = _Table(profile)
    nodes = op_nodes(capture.graph)
    for node in capture.graph.nodes:
        if node in profile.externals:
            table.add_external(node, profile.externals[node])
    for index, node in enumerate(nodes):
        table.add_op(index, node)
    outputs, loss = _output(capture.graph)
    boundaries, pinned = _constraints(nodes, table, undone)
    ops = tuple(
        replace(op, pinned=True) if index in pinned else op for index, op in enumerate(table.ops)
    )
    return Problem(
        ops=ops,
        values=tuple(table.values),
        storages=tuple(table.storages),
        outputs=tuple(dict.fromkeys([*(table.value_of[node] for node in outputs), *table.lasting])),
        loss=table.value_of[loss],
        boundaries=boundaries,
        parameter_bytes=profile.parameter_bytes,
        buffer_bytes=profile.buffer_bytes,
        batch_bytes=profile.batch_bytes,
        gradient_bytes=profile.gradient_bytes,
        number_bytes=sum(profile.facts[node].number_bytes for node in nodes),
        forward_held=tuple(table.forward_held),
        random_state_bytes=_CPU_RANDOM_STATE_BYTES if profile.device_type == "cpu" else 0,
        region_cost=profile.region_cost,
        signature=capture.signature,
    )


@dataclass(slots=True)
class _Table:
    """The problem under construction."""

    profile: Profile
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    value_of: dict[fx.Node, int] = field(default_factory=dict)
    results_of: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    # Whose call allocated a storage, and which value of a tensor another followed by a write.
    makers: dict[int, fx.Node] = field(default_factory=dict)
    contents: dict[int, int] = field(default_factory=dict)
    external_values: dict[int, int] = field(default_factory=dict)
    external_storages: dict[int, int] = field(default_factory=dict)
    forward_held: list[int] = field(default_factory=list)
    lasting: list[int] = field(default_factory=list)

    def add_external(self, node: fx.Node, external: External) -> None:
        """A tensor that is there before: one value an object, one storage an allocation."""
        if external.storage not in self.external_storages:
            self.external_storages[external.storage] = len(self.storages)
            self.storages.append(Storage(nbytes=external.storage_bytes))
        if external.tensor not in self.external_values:
            self.external_values[external.tensor] = len(self.values)
            self.values.append(
                Value(
                    storage=self.external_storages[external.storage],
                    gradient_bytes=external.gradient_bytes,
                    leaf=external.gradient_bytes > 0,
                    parameter=external.kind in ("parameter", "buffer"),
                )
            )
        self.value_of[node] = self.external_values[external.tensor]

    def add_op(self, index: int, node: fx.Node) -> None:
        """One op, its results and their storages."""
        facts = self.profile.facts[node]
        bare = Op(
            name=node.name,
            target=target_name(node),
            module=str(node.meta.get("module", "")),
            source=str(node.meta.get("source", "")),
        )
        if node in self.profile.unpacked:
            root, result = self.profile.unpacked[node]
            if result >= 0:
                self.value_of[node] = self.results_of[root][result]
                self.ops.append(replace(bare, inputs=(self.value_of[node],)))
            else:
                self.ops.append(bare)
            return
        arguments = tuple(dict.fromkeys(self._arguments(node)))
        results, hidden = self._allocate(index, node, facts, arguments)
        self.results_of[node] = results
        returned = [r for r, fact in zip(results, facts.results, strict=True) if fact.returned]
        if len(returned) == 1:
            self.value_of[node] = returned[0]
        self._renew(node, results, facts, arguments)
        outputs = tuple(r for r in dict.fromkeys(results) if r not in arguments)
        gradients = _gradients(facts, arguments, results, outputs)
        for written, before, after in self._renew_bases(results, facts, arguments):
            arguments, outputs = (*arguments, before), (*outputs, after)
            gradients = tuple(
                replace(g, value=before) if g.value == written else g for g in gradients
            )
        saved = (self._storage(ref, arguments, results, hidden) for ref in facts.saved)
        # The loss holds all nodes to the end of backward, and these what their contexts have.
        context = {self._storage(ref, arguments, results, hidden) for ref in facts.context}
        self.lasting += [
            value
            for value in (*arguments, *results)
            if (storage := self.values[value].storage) in context
            and self.storages[storage].producer is not None
        ]
        self.ops.append(
            replace(
                bare,
                inputs=arguments,
                outputs=outputs,
                saved=tuple(dict.fromkeys(s for s in saved if not self._is_parameter(s))),
                copied=self._copied(node, facts, arguments),
                packs=facts.packs,
                forward_workspace_bytes=facts.forward_workspace_bytes,
                dropped_workspace_bytes=facts.dropped_workspace_bytes,
                backward_workspace_bytes=facts.backward_workspace_bytes,
                backward_workspace_alone_bytes=facts.backward_workspace_alone_bytes,
                early_backward_bytes=facts.early_backward_bytes,
                early_backward_alone_bytes=facts.early_backward_alone_bytes,
                stop_peak_bytes=facts.stop_peak_bytes,
                gradient_bytes=facts.fresh_gradient_bytes,
                gradients=gradients,
                cost=facts.cost,
                stop_cost=facts.stop_cost,
                backward_cost=facts.backward_cost,
                flops=facts.flops,
                stop_flops=facts.stop_flops,
                backward_flops=facts.backward_flops,
                random=facts.random,
                pinned=_stays_outside(node, facts),
            )
        )

    def _renew(
        self, node: fx.Node, results: tuple[int, ...], facts: OpFacts, arguments: tuple[int, ...]
    ) -> None:
        """Later readers of what was written in place read its new content."""
        for result, fact in zip(results, facts.results, strict=True):
            if fact.written is None:
                continue
            if result != arguments[fact.written]:
                self.contents[result] = arguments[fact.written]
            for argument in node.meta["writes"]:
                if self.value_of[argument] == arguments[fact.written]:
                    self.value_of[argument] = result

    def _tensor(self, value: int) -> int:
        """Give the first value of the tensor that a value is a content of."""
        while value in self.contents:
            value = self.contents[value]
        return value

    def _renew_bases(
        self, results: tuple[int, ...], facts: OpFacts, arguments: tuple[int, ...]
    ) -> Iterator[tuple[int, int, int]]:
        """Give a tensor a new value whose view was written: that value, and those of the tensor.

        Its gradient goes through the write from then on, and not through the view.
        """
        for fact in facts.results:
            if fact.written is None:
                continue
            written = arguments[fact.written]
            maker = self.makers.get(self.values[written].storage)
            before = None if maker is None else self.value_of.get(maker)
            if before is None or before == written or before in results:
                continue
            if self._tensor(before) == self._tensor(written):
                continue
            after = len(self.values)
            value = self.values[before]
            if fact.gradient_bytes and not value.gradient_bytes:
                # Zeros, say, that have a gradient from the write on.
                value = replace(value, gradient_bytes=self.storages[value.storage].nbytes)
            self.values.append(value)
            self.contents[after] = before
            self.value_of.update((n, after) for n, v in self.value_of.items() if v == before)
            yield written, before, after

    def _arguments(self, node: fx.Node) -> list[int]:
        found: list[int] = []

        def add(argument: fx.Node) -> fx.Node:
            if argument in self.value_of:
                found.append(self.value_of[argument])
            return argument

        fx.map_arg((node.args, node.kwargs), add)
        return found

    def _allocate(
        self, index: int, node: fx.Node, facts: OpFacts, arguments: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        results: list[int] = []
        for number, result in enumerate(facts.results):
            same = self._same_value(result, arguments)
            if same is not None:
                results.append(same)
                continue
            if result.storage == ("result", number):
                storage = len(self.storages)
                self.storages.append(Storage(nbytes=result.storage_bytes, producer=index))
                self.makers[storage] = node
            else:
                storage = self._storage(result.storage, arguments, tuple(results), ())
            results.append(len(self.values))
            self.values.append(Value(storage=storage, gradient_bytes=result.gradient_bytes))
        hidden: list[int] = []
        for nbytes in facts.hidden_bytes:
            hidden.append(len(self.storages))
            self.storages.append(Storage(nbytes=nbytes, producer=index))
        self.forward_held += [hidden[number] for number in facts.cached]
        return tuple(results), tuple(hidden)

    def _same_value(self, result: Result, arguments: tuple[int, ...]) -> int | None:
        """The argument that a result is: handed on, or a buffer whose new content it is."""
        if result.same_as is not None:
            return arguments[result.same_as]
        if result.written is not None and self.values[arguments[result.written]].parameter:
            return arguments[result.written]
        return None

    def _storage(
        self,
        ref: Ref,
        arguments: tuple[int, ...],
        results: tuple[int, ...],
        hidden: tuple[int, ...],
    ) -> int:
        if ref.kind == "hidden":
            return hidden[ref.number]
        values = arguments if ref.kind == "argument" else results
        return self.values[values[ref.number]].storage

    def _copied(self, node: fx.Node, facts: OpFacts, arguments: tuple[int, ...]) -> tuple[int, ...]:
        """Statistics that it writes and saves: its replay works on clones of them."""
        saved = {arguments[ref.number] for ref in facts.saved if ref.kind == "argument"}
        written = (a for a in node.meta.get("writes", ()) if a.op == "get_attr")
        values = dict.fromkeys(self.value_of[argument] for argument in written)
        return tuple(self.values[value].storage for value in values if value in saved)

    def _is_parameter(self, storage: int) -> bool:
        return self.storages[storage].producer is None


def _gradients(
    facts: OpFacts,
    arguments: tuple[int, ...],
    results: tuple[int, ...],
    outputs: tuple[int, ...],
) -> tuple[Gradient, ...]:
    found: list[Gradient] = []
    for gradient in facts.gradients:
        source = gradient.source.number
        if gradient.source.kind == "result":
            if results[source] not in outputs:
                continue  # an argument handed on unchanged: nothing happens to its gradient
            source = ~outputs.index(results[source])
        value = arguments[gradient.argument]
        found.append(Gradient(value=value, source=source, dense=gradient.dense, view=gradient.view))
    return tuple(found)


def _stays_outside(node: fx.Node, facts: OpFacts) -> bool:
    return (
        node.target is expect
        or bool(facts.context)
        or facts.packs_unfilled
        # Each time but the first the whole region would run again.
        or facts.asks_again
        or bool(node.meta.get("pinned"))
        or node.meta.get("stage") == "loss"
    )


def _output(graph: fx.Graph) -> tuple[tuple[fx.Node, ...], fx.Node]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    tensors, loss = output.args[0]
    return tuple(tensors), loss


def _constraints(
    nodes: tuple[fx.Node, ...], table: _Table, undone: bool
) -> tuple[tuple[bool, ...], frozenset[int]]:
    """Where no edge may lie, and which ops stay outside, because of writes in place.

    A write to a storage that an op of the graph made belongs in one region with that op and
    the readers in between. A write to what was there before runs once, so it stays outside,
    and so does whoever reads the storage before it; running statistics apart, which the
    emitted code replaces by copies on recomputation.
    """
    boundaries = [True] * (len(nodes) + 1)
    pinned: set[int] = set()
    for index, node in enumerate(nodes):
        if node in table.profile.unpacked:
            boundaries[index] = False
        for argument in node.meta.get("writes", ()):
            storage = table.values[table.value_of[argument]].storage
            producer = table.storages[storage].producer
            if producer is not None:
                boundaries[producer + 1 : index + 1] = [False] * (index - producer)
            elif undone and argument.meta.get("kind") == "buffer":
                continue
            elif not _is_statistic(node, argument, table):
                pinned.update(i for i in range(index) if _reads(table.ops[i], storage, table))
                pinned.add(index)
    return tuple(boundaries), frozenset(pinned)


def _is_statistic(node: fx.Node, written: fx.Node, table: _Table) -> bool:
    """A buffer that is updated beside the results, not through them."""
    if written.op != "get_attr" or written.meta.get("kind") != "buffer":
        return False
    facts = table.profile.facts[node]
    storage = table.values[table.value_of[written]].storage
    returned = [
        table.values[value].storage
        for value, result in zip(table.results_of[node], facts.results, strict=True)
        if result.returned
    ]
    return bool(returned) and storage not in returned


def _reads(op: Op, storage: int, table: _Table) -> bool:
    return any(table.values[value].storage == storage for value in op.inputs)
