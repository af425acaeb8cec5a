"""The cut by maximum flow, on what Hypothesis once found."""

from __future__ import annotations

from solvers.judge.replay import replay_of
from solvers.judge.wellformed import check_plan
from solvers.min_cut import candidates
from solvers.plan import Plan
from solvers.problem import Gradient, Op, Problem, Storage, Value


def test_no_region_takes_in_a_pinned_op_of_a_stretch_written_in_place() -> None:
    def op(i: int, *, pinned: bool, saved: tuple[int, ...] = ()) -> Op:
        return Op(
            name=f"op_{i}",
            inputs=(i,),
            outputs=(i + 1,),
            saved=saved,
            packs=bool(saved),
            gradient_bytes=(1,),
            gradients=(Gradient(value=i, source=0),),
            cost=1,
            pinned=pinned,
        )

    problem = Problem(
        ops=(
            op(0, pinned=False),
            op(1, pinned=True, saved=(2,)),
            op(2, pinned=True, saved=(1,)),
            op(3, pinned=False),
        ),
        values=tuple(
            Value(storage=storage, gradient_bytes=4 if i == 4 else 1)
            for i, storage in enumerate((0, 1, 1, 3, 4))
        ),
        storages=(
            Storage(nbytes=16),
            Storage(nbytes=1, producer=0),
            Storage(nbytes=5, producer=1),
            Storage(nbytes=1, producer=2),
            Storage(nbytes=4, producer=3),
        ),
        outputs=(),
        loss=4,
        boundaries=(True, False, True, True, True),
    )
    for regions in candidates(replay_of(problem)):
        check_plan(Plan(regions=regions), problem)
