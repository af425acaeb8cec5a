"""The stages of a step: the chain that solvers of chains see."""

from __future__ import annotations

from solvers.judge.replay import Replay
from solvers.search.blocks import blocks

_OPS = 24
_STAGES = 40


def stage_edges(replay: Replay) -> tuple[int, ...]:
    """Return where stages meet, first and last position included.

    Repeated blocks and what lies between them, or single ops where there are at most 24.
    Neighbours are joined until each saves something and there are at most 40.
    """
    problem, graph = replay.problem, replay.graph
    size = graph.size
    if size <= _OPS:
        edges = [i for i in range(size + 1) if problem.boundaries[i]]
    else:
        runs = blocks(problem)
        edges = sorted({0, size, *(edge for run in runs for edge in run)})
        every = -(-len(edges) // _STAGES)
        edges = [0, *edges[1:-1][::every], size]
    stages = [0]
    for edge in edges[1:]:
        if any(graph.packs[stages[-1] : edge]) and edge < size:
            stages.append(edge)
    if len(stages) > 1 and not any(graph.packs[stages[-1] : size]):
        stages.pop()
    return (*stages, size)
