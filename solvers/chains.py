"""Chains of equal ops, for examples and for what is known about them."""

from __future__ import annotations

from solvers.problem import Gradient, Op, Problem, Storage, Value


def equal_chain(
    *, ops: int, input_bytes: int, hidden_bytes: int = 0, gradient_bytes: int | None = None
) -> Problem:
    """Return a chain of ops that each save their input and a hidden storage, at cost 1.

    Parameters
    ----------
    ops : int
    input_bytes : int
        Bytes of every value of the chain.
    hidden_bytes : int
        What each op saves besides, of its own making.
    gradient_bytes : int, optional
        Bytes of the gradient of every value, as many as of the value by default.

    Examples
    --------
    >>> problem = equal_chain(ops=3, input_bytes=4)
    >>> len(problem.ops), problem.forward_cost
    (3, 3)
    """
    gradient = input_bytes if gradient_bytes is None else gradient_bytes
    storages = [Storage(nbytes=input_bytes)]
    values = [Value(storage=0, gradient_bytes=gradient, leaf=True)]
    calls = []
    for i in range(ops):
        storages.append(Storage(nbytes=input_bytes, producer=i))
        values.append(Value(storage=len(storages) - 1, gradient_bytes=gradient))
        saved = [values[i].storage]
        if hidden_bytes:
            storages.append(Storage(nbytes=hidden_bytes, producer=i))
            saved.append(len(storages) - 1)
        calls.append(
            Op(
                name=f"y{i}",
                inputs=(i,),
                outputs=(i + 1,),
                saved=tuple(saved),
                packs=True,
                gradient_bytes=(gradient,),
                gradients=(Gradient(value=i, source=0),),
                cost=1,
                stop_cost=1 if hidden_bytes else 0,
            )
        )
    return Problem(
        ops=tuple(calls),
        values=tuple(values),
        storages=tuple(storages),
        outputs=(),
        loss=ops,
        boundaries=(True,) * (ops + 1),
    )
