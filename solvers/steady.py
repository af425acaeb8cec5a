"""A problem with costs that do not change from run to run, for what must not depend on them.

Measured costs differ a little every time. A peak does not depend on them, but a search that
asks for the cheapest plan of a budget looks elsewhere when they change. What a user is told to
raise the budget to, and what is found there once costs have been measured anew, is therefore
searched for under costs made of bytes and FLOPs.
"""

from __future__ import annotations

from dataclasses import replace

from solvers.judge.replay import Replay, replay_of
from solvers.problem import Op, Problem

# In ns, as deterministic costs are elsewhere: 5 GB/s, 50 GFLOP/s, and 5 us to begin an op.
_BYTES, _FLOPS, _START = 5, 50, 5_000


def steady(problem: Problem) -> Problem:
    """Return a problem with costs made of its bytes and FLOPs, made once as long as it is kept.

    Regions are well-formed for both or for neither, and of the same peak.

    Examples
    --------
    >>> from solvers.chains import equal_chain
    >>> problem = equal_chain(ops=2, input_bytes=4)
    >>> [op.cost for op in steady(problem).ops]
    [5000, 5000]
    """
    replay = replay_of(problem)
    if replay.steady is None:
        ops = tuple(_steady_op(replay, index) for index in range(len(problem.ops)))
        replay.steady = replace(problem, ops=ops, region_cost=1)
    return replay.steady


def _steady_op(replay: Replay, index: int) -> Op:
    graph, op = replay.graph, replay.problem.ops[index]
    made = graph.produced[index]
    cost = _START + sum(graph.nbytes[s] for s in made) // _BYTES + op.flops // _FLOPS
    # Whether an op runs at the end of a replay at all is read from its cost up to there.
    runs = op.stop_cost > 0 or bool(set(made) & set(graph.saved[index]))
    return replace(op, cost=cost, stop_cost=cost if runs else 0, backward_cost=0)
