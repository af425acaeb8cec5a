"""The only judge: memory and recomputation of one step under a plan.

Replays, storage by storage, what eager autograd and ``torch.utils.checkpoint`` (with
``use_reentrant=False`` and early stop) do. See ``frames`` for regions, ``gradients`` for what
backward allocates, ``replay`` for how they add up.
"""

from __future__ import annotations

from solvers.judge.replay import replay_of
from solvers.judge.wellformed import check_plan
from solvers.plan import Plan, Region
from solvers.prediction import Prediction
from solvers.problem import Problem


def simulate(problem: Problem, plan: Plan, *, timeline: bool = False) -> Prediction:
    """Predict peak and recomputation of one step of ``problem`` under ``plan``.

    Parameters
    ----------
    problem : Problem
    plan : Plan
    timeline : bool
        Also list the level at every instant.

    Returns
    -------
    Prediction

    Raises
    ------
    PlanError
        If the plan is malformed or made for another problem.

    Notes
    -----
    Exact integers. Linear in the number of ops, regions replayed before are looked up. What
    an op outside the differentiated graph saved is counted to the end of the step if an output
    of the problem hangs on it, else to the end of its graph in forward; inside a replay the
    latter counts as not saved.

    Examples
    --------
    >>> from solvers.problem import Gradient, Op, Storage, Value
    >>> def op(i):
    ...     return Op(
    ...         name=f"y{i}",
    ...         inputs=(i,),
    ...         outputs=(i + 1,),
    ...         saved=(i,),
    ...         packs=True,
    ...         gradient_bytes=(8,),
    ...         gradients=(Gradient(value=i, source=0),),
    ...         cost=1,
    ...     )
    >>> problem = Problem(
    ...     ops=tuple(op(i) for i in range(4)),
    ...     values=tuple(Value(storage=i, gradient_bytes=8) for i in range(5)),
    ...     storages=(Storage(nbytes=8), *(Storage(nbytes=8, producer=i) for i in range(4))),
    ...     outputs=(),
    ...     loss=4,
    ...     boundaries=(True,) * 5,
    ... )
    >>> simulate(problem, Plan()).peak_bytes
    48
    >>> simulate(problem, Plan.flat([(0, 2), (2, 4)])).recompute_cost
    2
    """
    check_plan(plan, problem)
    return replay_of(problem).predict(plan.regions, timeline=timeline)


def idle_ops(problem: Problem, plan: Plan) -> dict[Region, frozenset[int]]:
    """Tell, for each region of a plan, which of its ops the code that is emitted leaves out.

    That is when it runs again. Ops of a region inside it are among them where that need not be
    called. What they saved is wanted all the same: ``simulate`` takes it that it is packed again
    from what they read.
    """
    frames = replay_of(problem).frames
    found = ((region, frames(region)) for region in plan.walk())
    left_out = frames.idling.left_out
    return {region: left_out(region, frame.idle, frame.stop) for region, frame in found}
