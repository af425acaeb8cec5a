"""Gradients in flight during backward. No plan changes them, so they are replayed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from solvers.judge.graph import Graph, defining_ops
from solvers.problem import Op, Problem

_Held = tuple[int, bool, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFlow:
    """Bytes of gradients around the backward of every op; zeros for ops not reached.

    Attributes
    ----------
    before : tuple of int
        Gradients alive when the op's backward first asks for something saved: what a
        recomputation finds.
    instant : tuple of int
        While its backward runs: its own gradients and workspace included.
    after : tuple of int
        Most while its gradients are delivered, when what it saved is already gone.
    workspace, early : tuple of int
        What of ``instant`` is workspace, and what of ``before`` the op has made itself.
    """

    before: tuple[int, ...]
    instant: tuple[int, ...]
    after: tuple[int, ...]
    workspace: tuple[int, ...]
    early: tuple[int, ...]


@dataclass(slots=True)
class _Flight:
    """Gradient storages with reference counts, in both modes at once.

    The modes differ only in what becomes of a leaf's finished gradient: added to a resident
    one and let go, or kept (fresh). A storage kept has no other holder, so one set of
    reference counts serves both.
    """

    references: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    resident: int = 0
    fresh: int = 0
    top_resident: int = 0
    top_fresh: int = 0

    def allocate(self, nbytes: int) -> int:
        self.references.append(1)
        self.sizes.append(nbytes)
        self.resident += nbytes
        self.fresh += nbytes
        self.note()
        return len(self.sizes) - 1

    def drop(self, storage: int) -> None:
        self.references[storage] -= 1
        if not self.references[storage]:
            self.resident -= self.sizes[storage]
            self.fresh -= self.sizes[storage]

    def note(self) -> None:
        self.top_resident = max(self.top_resident, self.resident)
        self.top_fresh = max(self.top_fresh, self.fresh)

    def restart(self) -> None:
        self.top_resident, self.top_fresh = self.resident, self.fresh


@dataclass(slots=True)
class _Engine:
    problem: Problem
    wanted: list[bool]
    missing: list[int]
    flight: _Flight = field(default_factory=_Flight)
    held: dict[int, _Held] = field(default_factory=dict)

    def run_backward(self, index: int) -> tuple[int, int, int]:
        """Allocate and deliver what op ``index`` gives.

        Returns
        -------
        resident, fresh, workspace : int
            Both levels at its instant, and what of them is workspace.
        """
        op, flight = self.problem.ops[index], self.flight
        own = [flight.allocate(nbytes) for nbytes in op.gradient_bytes]
        of_outputs = [self.held.pop(v, None) for v in op.outputs]
        workspace = self._workspace_bytes(op, of_outputs)
        instant = (flight.resident + workspace, flight.fresh + workspace, workspace)
        deliveries = []
        for gradient in op.gradients:
            dense, view = gradient.dense, gradient.view
            if gradient.source >= 0:
                storage = own[gradient.source]
            else:
                of_output = of_outputs[~gradient.source]
                if of_output is None:
                    continue
                storage, handed_dense, handed_view = of_output
                dense = dense and handed_dense
                view = view or handed_view
            flight.references[storage] += 1
            deliveries.append((gradient.value, storage, dense, view))
        for storage in own:
            flight.drop(storage)
        for of_output in of_outputs:
            if of_output is not None:
                flight.drop(of_output[0])
        flight.restart()
        for value, storage, dense, view in deliveries:
            self._deliver(value, storage, dense, view)
        for value in dict.fromkeys(value for value, *_ in deliveries):
            if self.problem.values[value].leaf and not self.missing[value]:
                self._accumulate(value)
        return instant

    def early_bytes(self, index: int) -> int:
        """Return what the backward of an op has made when it first asks for something saved."""
        op = self.problem.ops[index]
        alone = self._are_alone([self.held.get(v) for v in op.outputs])
        if alone and op.early_backward_alone_bytes is not None:
            return op.early_backward_alone_bytes
        return op.early_backward_bytes

    def _workspace_bytes(self, op: Op, of_outputs: Sequence[_Held | None]) -> int:
        if op.backward_workspace_alone_bytes is not None and self._are_alone(of_outputs):
            return op.backward_workspace_alone_bytes
        return op.backward_workspace_bytes

    def _are_alone(self, gradients: Sequence[_Held | None]) -> bool:
        """Tell whether nobody else has these gradients, so that an op can let go of them."""
        return all(self.flight.references[held[0]] == 1 for held in gradients if held is not None)

    def _deliver(self, value: int, storage: int, dense: bool, view: bool) -> None:
        flight = self.flight
        self.missing[value] -= 1
        if not self.wanted[value]:
            flight.drop(storage)
            return
        if value not in self.held:
            self.held[value] = (storage, dense, view)
            return
        earlier, earlier_dense, earlier_view = self.held[value]
        if earlier_dense and not earlier_view and flight.references[earlier] == 1:
            flight.drop(storage)
            return
        total = flight.allocate(self.problem.values[value].gradient_bytes)
        flight.drop(earlier)
        flight.drop(storage)
        self.held[value] = (total, True, False)

    def _accumulate(self, value: int) -> None:
        """Hand a leaf's finished gradient to ``.grad``."""
        storage, dense, _ = self.held.pop(value)
        flight = self.flight
        if dense and flight.references[storage] == 1:
            flight.references[storage] = 0
            flight.resident -= flight.sizes[storage]
            return
        flight.fresh += self.problem.values[value].gradient_bytes
        flight.note()
        flight.drop(storage)


def gradient_flows(problem: Problem, graph: Graph) -> tuple[GradientFlow, GradientFlow]:
    """Replay the gradients of one backward.

    Returns
    -------
    resident, fresh : GradientFlow
        With parameter gradients resident, and with fresh ones, which stay once made.
    """
    definers = defining_ops(problem)
    engine = _Engine(
        problem=problem,
        wanted=[
            value.leaf or (definers[v] >= 0 and graph.reached[definers[v]])
            for v, value in enumerate(problem.values)
        ],
        missing=_contributions(problem, graph),
    )
    flight = engine.flight
    seed = flight.allocate(problem.values[problem.loss].gradient_bytes)
    engine.held[problem.loss] = (seed, True, False)
    # loss.backward() holds the gradient that it starts from to the end.
    flight.references[seed] += 1
    own = [[0] * graph.size for _ in range(2)]
    resident, fresh = ([[0] * graph.size for _ in range(3)] for _ in range(2))
    for index in range(graph.size - 1, -1, -1):
        if not graph.reached[index]:
            continue
        early = own[1][index] = engine.early_bytes(index)
        resident[0][index], fresh[0][index] = flight.resident + early, flight.fresh + early
        resident[1][index], fresh[1][index], own[0][index] = engine.run_backward(index)
        resident[2][index], fresh[2][index] = flight.top_resident, flight.top_fresh
    return _flow(*resident, *own), _flow(*fresh, *own)


def _flow(
    before: list[int], instant: list[int], after: list[int], workspace: list[int], early: list[int]
) -> GradientFlow:
    return GradientFlow(
        before=tuple(before),
        instant=tuple(instant),
        after=tuple(after),
        workspace=tuple(workspace),
        early=tuple(early),
    )


def _contributions(problem: Problem, graph: Graph) -> list[int]:
    """Return how many gradients each value will be handed."""
    counts = [0] * len(problem.values)
    counts[problem.loss] = 1
    for index in range(graph.size - 1, -1, -1):
        op = problem.ops[index]
        if not graph.reached[index]:
            continue
        for gradient in op.gradients:
            if gradient.source >= 0 or counts[op.outputs[~gradient.source]]:
                counts[gradient.value] += 1
    return counts
