"""Blocks: the stretches of ops between which people put checkpoints by hand."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from solvers.plan import Region
from solvers.problem import Problem


def blocks(problem: Problem) -> tuple[tuple[int, int], ...]:
    """Return the ops of each repeated block, such as the layers of a transformer.

    Parameters
    ----------
    problem : Problem

    Returns
    -------
    tuple of (start, stop)
        Disjoint, in order, edges allowed. Modules that differ only in the last number of their
        path are siblings; the siblings that cover most cost are the blocks. Where no module
        repeats, chunks of equal cost, the square root of the number of ops of them.
    """
    runs = _sibling_runs(problem)
    found = [_allowed(problem, start, stop) for start, stop in runs]
    disjoint: list[tuple[int, int]] = []
    for start, stop in found:
        start = max(start, disjoint[-1][1]) if disjoint else start
        if start < stop:
            disjoint.append((start, stop))
    return tuple(disjoint) if len(disjoint) > 1 else chunks(problem)


def _sibling_runs(problem: Problem) -> list[tuple[int, int]]:
    """Return first and last appearance of each of the siblings that cover most cost."""
    cost: Counter[str] = Counter()
    spans: dict[str, dict[str, list[int]]] = {}
    for index, op in enumerate(problem.ops):
        parts = op.module.split(".")
        for depth, part in enumerate(parts):
            if not part.isdigit():
                continue
            family, member = ".".join(parts[:depth]), ".".join(parts[: depth + 1])
            cost[family] += op.cost
            span = spans.setdefault(family, {}).setdefault(member, [index, index + 1])
            span[1] = index + 1
    families = [family for family in cost if len(spans[family]) > 1]
    if not families:
        return []
    # Of two families that cover nearly the same ops the outer one has the larger blocks.
    best = max(families, key=lambda family: (cost[family], -len(family)))
    return sorted((start, stop) for start, stop in spans[best].values())


def numbered(problem: Problem, longest: int) -> tuple[tuple[int, int], ...]:
    """Return the ops of numbered modules, the outermost of at most so many ops.

    Parameters
    ----------
    problem : Problem
    longest : int

    Returns
    -------
    tuple of (start, stop)
        Disjoint, in order, edges allowed: of the ``up_blocks.0.attentions.1.blocks.2`` of a UNet
        the inner ones, where the outer ones are long. A module that runs twice counts as one.
    """
    spans: dict[str, list[int]] = {}
    for index, op in enumerate(problem.ops):
        parts = op.module.split(".")
        for depth, part in enumerate(parts):
            if part.isdigit():
                span = spans.setdefault(".".join(parts[: depth + 1]), [index, index + 1])
                span[1] = index + 1
    found: list[tuple[int, int]] = []
    outermost_first = sorted((start, -stop) for start, stop in spans.values())
    for start, negative in outermost_first:
        run = _allowed(problem, start, -negative)
        if run[0] < run[1] <= run[0] + longest and not (found and run[0] < found[-1][1]):
            found.append(run)
    return tuple(found)


def _allowed(problem: Problem, start: int, stop: int) -> tuple[int, int]:
    """Shrink a run until both edges are allowed."""
    while start < stop and not problem.boundaries[start]:
        start += 1
    while stop > start and not problem.boundaries[stop]:
        stop -= 1
    return start, stop


def chunks(problem: Problem) -> tuple[tuple[int, int], ...]:
    """Return chunks of nearly equal cost that cover all ops; edges allowed."""
    size = len(problem.ops)
    number = max(2, round(size**0.5))
    total = problem.forward_cost
    edges, done = [0], 0
    for index, op in enumerate(problem.ops):
        done += op.cost
        due = done * number >= total * len(edges)
        if due and problem.boundaries[index + 1] and index + 1 > edges[-1]:
            edges.append(index + 1)
    if edges[-1] != size:
        edges.append(size)
    return tuple(pairwise(edges))


def regions_over(problem: Problem, start: int, stop: int) -> list[Region]:
    """Return regions that cover a run, split where ops have to stay outside."""
    regions = []
    low = start
    for index in range(start, stop + 1):
        if index < stop and not problem.ops[index].pinned:
            continue
        first, last = _allowed(problem, low, index)
        if first < last:
            regions.append(Region(start=first, stop=last))
        low = index + 1
    return regions


def grouped(problem: Problem, runs: tuple[tuple[int, int], ...], size: int) -> tuple[Region, ...]:
    """Return one region per ``size`` consecutive blocks."""
    regions: list[Region] = []
    for first in range(0, len(runs), size):
        group = runs[first : first + size]
        regions += regions_over(problem, group[0][0], group[-1][1])
    return tuple(regions)
