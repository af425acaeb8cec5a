"""Ops that no replay needs: backward wants what they read, and not what they make.

A region that makes a normalized ``x`` again for the gradients of three matmuls has to hand
``checkpoint`` that ``x`` once for each of them. The matmuls need not run: their results are read
after the region, or by ops that need not run either. Which ops these are follows from the region.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.judge.graph import Graph, defining_ops
from solvers.plan import Region
from solvers.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """What the replay of a region does not run.

    Attributes
    ----------
    ops : frozenset of int
        Ops of which nothing is wanted, those of whole regions inside it included: what they
        saved is packed again from what they read.
    kept : tuple of int
        Ops of the region's ``kept`` of which something is wanted, which is held from forward.
    """

    ops: frozenset[int]
    kept: tuple[int, ...]

    def __contains__(self, op: int) -> bool:
        return op in self.ops or op in self.kept


class Idling:
    """Tell what is idle in the regions of a problem."""

    def __init__(self, problem: Problem, graph: Graph) -> None:
        self.definers = defining_ops(problem)
        self.inputs = tuple(op.inputs for op in problem.ops)
        self._results = tuple(bool(op.outputs) for op in problem.ops)
        self.makes = tuple(bool(produced) for produced in graph.produced)
        storage = [value.storage for value in problem.values]
        # Of what was there before the step nobody says whether it is saved: a view of that, made
        # by an op, may be.
        before = [
            problem.storages[s].producer is None and self.definers[v] >= 0
            for v, s in enumerate(storage)
        ]
        self.packed = tuple(
            tuple(v for v in op.inputs if storage[v] in op.saved or before[v]) for op in problem.ops
        )
        casts = {problem.storages[s].producer for s in problem.forward_held}
        # Where modules are the regions, their own Python runs, and all of it.
        self._runs = tuple(
            problem.spans is not None or op.pinned or op.random or bool(op.copied) or i in casts
            for i, op in enumerate(problem.ops)
        )
        self._stops_before = tuple(op.stop_cost == 0 for op in problem.ops)
        self.may_rest = tuple(
            not self._runs[i]
            and problem.boundaries[i]
            and problem.boundaries[i + 1]
            and len(op.outputs) <= 1
            and (bool(op.outputs) or not graph.packs[i])
            and {storage[v] for v in self.packed[i]}.issuperset(graph.saved[i])
            for i, op in enumerate(problem.ops)
        )

    def __call__(self, region: Region, last: int) -> Idle:
        """Tell what is idle in a region whose replay ends at op ``last``, or at the region there.

        Linear in the number of its ops.
        """
        items = [item for item in _items(region) if _start(item) <= last]
        needed: set[int] = set()
        for item in reversed(items):
            wanted = self._wanted(item, needed, region.kept)
            needed.update(self.definers[v] for v in wanted)
        idle: set[int] = set()
        for item in items:
            if isinstance(item, Region):
                if self._region_rests(item, needed):
                    idle.update(range(item.start, item.stop))
            elif item not in needed and self.may_rest[item]:
                idle.add(item)
        held = tuple(i for i in region.kept if i not in idle)
        return Idle(ops=frozenset(idle), kept=held)

    def left_out(self, region: Region, idle: frozenset[int], last: int) -> frozenset[int]:
        """Return the idle ops that the code of a region has to leave out.

        To run a view of what is there costs less than not to. Where a replay ends before its last
        op has run, there is nothing to leave out.
        """
        called = {i for child in region.children for i in range(child.start, child.stop)}
        found = {i for i in idle if i in called or i in region.kept}
        for i in sorted(idle):
            costs = self.makes[i] and not (i == last and self._stops_before[i])
            if costs or any(self.definers[v] in found for v in self.inputs[i]):
                found.add(i)
        return frozenset(found)

    def table(self, low: int, high: int, kept: frozenset[int] = frozenset()) -> NDArray[np.bool_]:
        """Return ``[k, t]``: whether a replay that ends with op ``t`` needs op ``k <= t``.

        Both less ``low``, of regions without regions inside, wherever they begin, that keep what
        they can of ``kept``: what is needed of these is held, and of all others made again.
        """
        size = high - low
        inputs, packed = (
            [[max(self.definers[v] - low, -1) for v in values] for values in of[low:high]]
            for of in (self.inputs, self.packed)
        )
        # What was made before the run need not be made: the last row takes it.
        needed = np.zeros((size + 1, size), bool)
        ends = np.arange(size)
        for k in range(size - 1, -1, -1):
            if not self.may_rest[low + k]:
                needed[k] |= ends >= k
            needed[packed[k]] |= ends >= k
            if low + k not in kept:
                needed[inputs[k]] |= needed[k]
        return needed[:size]

    def _wanted(self, item: int | Region, needed: set[int], kept: tuple[int, ...]) -> Iterable[int]:
        """Return the values that a replay must have at an item, which is needed if it must run."""
        if isinstance(item, Region):
            if not self._region_rests(item, needed):
                needed.update(range(item.start, item.stop))
            # The call of a region packs all that it reads, whether or not the region runs.
            inside = range(item.start, item.stop)
            read = (v for i in inside for v in self.inputs[i])
            return (v for v in read if self.definers[v] not in inside)
        if item in kept or (self.may_rest[item] and item not in needed):
            return self.packed[item]
        needed.add(item)
        return self.inputs[item]

    def _region_rests(self, region: Region, needed: set[int]) -> bool:
        inside = range(region.start, region.stop)
        # What an op without a result of its own hands on, others read as what it is given.
        apart = all(self._results[i] and not self._runs[i] for i in inside)
        return apart and needed.isdisjoint(inside)


def _items(region: Region) -> list[int | Region]:
    """Return the ops and the regions that a region calls, in order."""
    items: list[int | Region] = []
    position = region.start
    for child in region.children:
        items += range(position, child.start)
        items.append(child)
        position = child.stop
    return [*items, *range(position, region.stop)]


def _start(item: int | Region) -> int:
    return item.start if isinstance(item, Region) else item
