"""Random small problems in which what is saved outweighs all else: there is much to decide."""

from __future__ import annotations

from hypothesis import strategies as st

from solvers import Plan, peak_bound, simulate
from solvers.problem import Gradient
from tests.solvers.problems import Builder, problems
from tests.solvers.test_chains import chains

SIZES = st.integers(10, 40)


@st.composite
def tight_problems(draw, most_ops=6):
    """Graphs with skips; ops save inputs, outputs, hidden storages, all or some, or nothing."""
    b = Builder()
    values = [b.value(b.storage(8), 1, leaf=True)]
    for i in range(draw(st.integers(3, most_ops))):
        inputs = [values[-1]]
        if i and draw(st.integers(0, 2)) == 0:
            inputs.append(draw(st.sampled_from(values[:-1])))
        out = b.value(b.storage(draw(SIZES), producer=i), 1)
        saved = [b.values[v].storage for v in inputs if draw(st.integers(0, 3))]
        own = draw(st.sampled_from(["none", "none", "hidden", "output"]))
        if own == "hidden":
            saved.append(b.storage(draw(SIZES), producer=i))
        if own == "output":
            saved.append(b.values[out].storage)
        cost = draw(st.integers(1, 9))
        b.op(
            inputs=tuple(inputs),
            outputs=(out,),
            saved=tuple(dict.fromkeys(saved)),
            packs=bool(saved),
            dropped_workspace_bytes=draw(st.sampled_from([None, None, -3])),
            early_backward_bytes=draw(st.sampled_from([0, 0, 2, -1])),
            early_backward_alone_bytes=draw(st.sampled_from([None, None, 0, -2])),
            stop_peak_bytes=draw(st.sampled_from([0, 0, 30])) if own != "none" else 0,
            gradient_bytes=tuple(1 for _ in inputs),
            gradients=tuple(Gradient(value=v, source=k) for k, v in enumerate(inputs)),
            cost=cost,
            stop_cost=draw(st.integers(0, cost)) if own != "none" else 0,
        )
        values.append(out)
    held = [values[1]] if draw(st.integers(0, 5)) == 0 else []
    return b.problem(values[-1], held)


def _is_quick(problem):
    """Whether all schedules can be looked at: their states are subsets of what is saved."""
    return sum(1 for s in problem.storages if s.producer is not None) <= 8


SMALL = st.one_of(
    tight_problems(most_ops=4), tight_problems(), chains(), problems(max_ops=6)
).filter(_is_quick)


def budgets(problem, count):
    """Budgets from what nothing goes below to the last at which something must run again."""
    plain = simulate(problem, Plan()).peak_bytes
    low = min(plain, peak_bound(problem))
    return [low + (plain - 1 - low) * k // (count - 1) for k in range(count)]


def detour():
    """A graph whose tightest schedules make one op twice before the next backward.

    ``c`` reads ``a`` and ``x``, and ``x`` is made from ``a`` by way of ``w``: to have ``a`` wait
    for ``x`` takes more room than to make it again, and the loss's own backward leaves no room
    to have either wait.
    """
    b = Builder()
    leaf = b.value(b.storage(8), 1, leaf=True)

    def add(inputs, size, saves, cost=1):
        index = len(b.ops)
        out = b.value(b.storage(size, producer=index), 1)
        own = b.storage(saves, producer=index) if saves else None
        b.op(
            inputs=tuple(inputs),
            outputs=(out,),
            saved=() if own is None else (own,),
            packs=own is not None,
            gradient_bytes=tuple(1 for _ in inputs),
            gradients=tuple(Gradient(value=v, source=k) for k, v in enumerate(inputs)),
            cost=cost,
            stop_cost=cost if own is not None else 0,
        )
        return out

    a = add([leaf], 40, 0)
    w = add([a], 60, 0)
    w2 = add([w], 60, 0)
    x = add([w2], 10, 0)
    c = add([a, x], 10, 45)
    loss = add([c], 1, 118)
    return b.problem(loss)
