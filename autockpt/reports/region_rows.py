"""The regions of a plan one by one: where they are, what each frees and costs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from autockpt.reports.layers import file_and_line
from solvers.judge.keeping import held_for
from solvers.judge.replay import replay_of
from solvers.plan import Region
from solvers.problem import Op, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRow:
    """One region of a plan.

    Attributes
    ----------
    module : str
        Dotted path of the module that holds all its ops, or the first and the last one.
    source : str
        ``file.py:line`` of its first op.
    start, stop : int
        Its ops are ``start <= i < stop`` in program order.
    depth : int
        0 for a region in no other one.
    freed_bytes : int
        Saved storages that do not live from forward to backward because of it (for a nested
        region: from its parent's recomputation to its own), less what is kept for it alone:
        inputs that nothing else keeps, and the state of the generator.
    recompute_cost, recompute_flops : int
        Of running it again once, up to its early stop.
    random : bool
        Whether it draws again what it drew, and so keeps the state of the generator.
    kept : int
        Number of its ops that do not run again: what they make and save is held instead.
    prologue : int
        Number of ops before it that run again with it, as what they make is not held for it.
    """

    module: str
    source: str
    start: int
    stop: int
    depth: int
    freed_bytes: int
    recompute_cost: int
    recompute_flops: int
    random: bool
    kept: int = 0
    prologue: int = 0

    @property
    def ops(self) -> int:
        """Number of its ops."""
        return self.stop - self.start


def region_rows(
    problem: Problem, regions: tuple[Region, ...], *, depth: int, start: int, stop: int
) -> Iterator[RegionRow]:
    """Yield a row for each region, nested ones after their parent.

    ``start`` and ``stop`` delimit what surrounds them.
    """
    freed = _freed_bytes(problem, regions, start, stop)
    for region, freed_bytes in zip(regions, freed, strict=True):
        ops = problem.ops[region.start : region.stop]
        frame = replay_of(problem).frames(region)
        yield RegionRow(
            module=region.module or _common_module(ops),
            source=file_and_line(ops[0].source),
            start=region.start,
            stop=region.stop,
            depth=depth,
            freed_bytes=freed_bytes,
            recompute_cost=frame.cost,
            recompute_flops=frame.flops,
            random=frame.random,
            kept=len(region.kept),
            prologue=len(region.prologue),
        )
        yield from region_rows(
            problem, region.children, depth=depth + 1, start=region.start, stop=region.stop
        )


def _freed_bytes(
    problem: Problem, regions: tuple[Region, ...], start: int, stop: int
) -> Iterator[int]:
    """Yield, for each region, the bytes it frees less those that are kept for it alone."""
    inside = {index for region in regions for index in range(region.start, region.stop)}
    held = {problem.values[value].storage for value in problem.outputs}
    for index in set(range(start, stop)) - inside:
        held.update(problem.ops[index].saved)
    saved = _saved_storages(problem, start, stop)
    inputs = [_input_storages(problem, region) for region in regions]
    frames = replay_of(problem).frames
    kept = [{s for i in frames(region).kept for s in held_for(problem, i)} for region in regions]
    lasting = held.union(*kept, *inputs)
    kept_anyway = held | saved
    made = _made_storages(problem, range(start, stop))
    for region, its_inputs, its_kept in zip(regions, inputs, kept, strict=True):
        freed = _saved_storages(problem, region.start, region.stop)
        freed &= _made_storages(problem, range(region.start, region.stop))
        extra = ((its_inputs & made) | (its_kept - freed)) - kept_anyway
        # A storage that several regions read is kept once, and charged to the first.
        kept_anyway |= extra
        state = frames(region).random
        yield (
            _nbytes(problem, freed - lasting)
            - _nbytes(problem, extra)
            - state * problem.random_state_bytes
        )


def _saved_storages(problem: Problem, start: int, stop: int) -> set[int]:
    return {storage for op in problem.ops[start:stop] for storage in op.saved}


def _input_storages(problem: Problem, region: Region) -> set[int]:
    ran = [*region.prologue, *range(region.start, region.stop)]
    read = {
        problem.values[value].storage
        for index in ran
        for value in problem.ops[index].inputs
        if not problem.values[value].parameter
    }
    return read - _made_storages(problem, ran)


def _nbytes(problem: Problem, storages: set[int]) -> int:
    return sum(problem.storages[storage].nbytes for storage in storages)


def _made_storages(problem: Problem, ops: Collection[int]) -> set[int]:
    return {index for index, item in enumerate(problem.storages) if item.producer in ops}


def _common_module(ops: tuple[Op, ...]) -> str:
    """Return ``h.3.attn`` for ops of one module, ``h.3-4`` for layers, else first and last."""
    paths = [tuple(op.module.split(".")) for op in ops if op.module]
    if not paths:
        return "(top)"
    depth = 0
    while all(len(path) > depth for path in paths) and len({path[depth] for path in paths}) == 1:
        depth += 1
    common, nexts = paths[0][:depth], [path[depth : depth + 1] for path in paths]
    if all(name and name[0].isdigit() for name in nexts):
        return ".".join((*common, f"{nexts[0][0]}-{nexts[-1][0]}"))
    return ".".join(common) or f"{_layer(paths[0])} .. {_layer(paths[-1])}"


def _layer(path: tuple[str, ...]) -> str:
    """Return a path up to its first index: ``down_blocks.0``."""
    depth = next((depth for depth, name in enumerate(path, 1) if name.isdigit()), len(path))
    return ".".join(path[:depth])
