"""Least recomputation with nothing kept but a cut of the graph, turned into regions."""

from __future__ import annotations

import time
from collections.abc import Iterator

import networkx as nx

from solvers.chen_greedy import saved_bytes, split_points
from solvers.judge.replay import Replay, replay_of
from solvers.plan import Plan, Region
from solvers.pricing import priced, require
from solvers.problem import Problem
from solvers.search.local import fitted

_PRICES = 300
_RATES = 24
_PARTS = (1, 2, 4, 8, 16, 32)
_SPREAD = 4096.0


def solve(problem: Problem, budget_bytes: int) -> Plan:
    """Choose what to keep by minimum cuts, and put the rest into regions.

    Parameters
    ----------
    problem : Problem
    budget_bytes : int
        Peak not to exceed, fixed bytes included.

    Returns
    -------
    Plan
        Any graph. For each price of a byte the choice of what is kept and what runs again is
        the best one when all else is recomputed op by op; regions recompute more than that,
        so there is no guarantee. Long runs are tried cut into parts.

    Raises
    ------
    NoPlanFoundError, InfeasibleError
        If the regions of no price fit; ``minimum_bytes`` is the least peak of any.

    Notes
    -----
    Per price of a byte one maximum flow over two nodes an op.

    References
    ----------
    H. He et al., *Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion
    Aware*, 2023: the min-cut partitioner of ``torch.compile``, without its list of ops.

    Examples
    --------
    >>> from solvers.chains import equal_chain
    >>> problem = equal_chain(ops=4, input_bytes=1, hidden_bytes=100)
    >>> plan = solve(problem, 300)
    >>> plan.peak_bytes <= 300, plan.recompute_cost <= problem.forward_cost
    (True, True)
    """
    started = time.perf_counter()
    replay = replay_of(problem)

    def order(regions: tuple[Region, ...]) -> tuple[bool, int, int]:
        peak, cost = replay.price(regions)
        fits = peak <= budget_bytes
        return (not fits, cost, peak) if fits else (not fits, peak, cost)

    found = list(candidates(replay))
    best = min(found, key=order)
    if replay.price(best)[0] > budget_bytes:
        best = fitted(replay, best, budget_bytes, _PRICES) or best
    plan = priced(problem, best, "min_cut", budget_bytes, started)
    return require(problem, plan, budget_bytes)


def candidates(replay: Replay) -> Iterator[tuple[Region, ...]]:
    """Yield the regions for rising prices of a byte, the plain step first."""
    yield ()
    nbytes = sum(replay.graph.nbytes[s] for made in replay.graph.produced for s in made)
    middle = max(1, replay.forward_cost) / max(1, nbytes)
    seen: set[tuple[Region, ...]] = {()}
    made, splits = saved_bytes(replay), split_points(replay)
    for k in range(_RATES):
        rate = middle * _SPREAD ** (2 * k / (_RATES - 1) - 1)
        kept, again = _cut(replay, rate)
        for part in _PARTS:
            regions = tuple(
                region
                for region in _regions(replay, kept, again, sum(made) // part, splits)
                # Moving an edge out of a stretch that writes in place may have taken one in.
                if not any(op.pinned for op in replay.problem.ops[region.start : region.stop])
            )
            if regions not in seen:
                seen.add(regions)
                yield regions


def _cut(replay: Replay, rate: float) -> tuple[set[int], set[int]]:
    """Return the storages to keep and the ops to run again, at a cost of ``rate`` per byte.

    A storage wanted while its producer does not run again is kept: an edge from the one to the
    other, cut where they are on different sides.
    """
    graph, ops = replay.graph, replay.problem.ops
    network = nx.DiGraph()
    held = set(graph.outputs)
    wanted = {
        s for i in range(graph.size) if graph.reached[i] for s in graph.saved[i] if s not in held
    }
    for i, op in enumerate(ops):
        if op.pinned:
            network.add_edge(("op", i), "sink")
        else:
            network.add_edge(("op", i), "sink", capacity=max(1, op.cost))
        for s in graph.reads[i]:
            if s not in held:
                network.add_edge(("op", i), ("storage", s))
    for s, producer in enumerate(graph.producer):
        if producer >= 0 and s not in held:
            price = max(1, round(rate * graph.nbytes[s]))
            network.add_edge(("storage", s), ("op", producer), capacity=price)
    for s in wanted:
        network.add_edge("source", ("storage", s))
    if "source" not in network:
        return set(), set()
    _, (side, _) = nx.minimum_cut(network, "source", "sink")
    again = {i for i in range(graph.size) if ("op", i) in side}
    kept = {
        s
        for s, producer in enumerate(graph.producer)
        if ("storage", s) in side and producer >= 0 and producer not in again
    }
    return kept, again


def _regions(
    replay: Replay, kept: set[int], again: set[int], limit: int, splits: set[int]
) -> Iterator[Region]:
    """Yield runs of ops that run again or save what is not kept.

    They end where something is kept, or have brought back so many bytes.
    """
    graph, problem = replay.graph, replay.problem
    start: int | None = None
    made = saved_bytes(replay)
    for i in range(graph.size + 1):
        inside = i < graph.size and not problem.ops[i].pinned
        if inside:
            inside = i in again or any(graph.producer[s] in again for s in graph.saved[i])
        full = start is not None and i in splits and sum(made[start:i]) > limit
        ended = not inside or full or (i > 0 and any(s in kept for s in graph.produced[i - 1]))
        if ended and start is not None and problem.boundaries[i]:
            yield Region(start=start, stop=i)
            start = None
        if start is None and inside and problem.boundaries[i]:
            start = i
