"""Guards: what python asked a tensor for is asked again, and must be the same.

A model that reads a value (``if y.abs().max() > 1``) has taken one branch while it was
recorded. The emitted forward asks the same question at the same place; another answer means
that another branch would have been taken.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._compile import _disable_dynamo


class GuardMiss(Exception):
    """A guard's answer differs from the recorded one; the recorded forward does not apply.

    Parameters
    ----------
    kind : str
        What was asked, a key of `ASKED`.
    value, expected : object
        The answer, and the recorded one.
    """

    def __init__(self, kind: str, value: object, expected: object) -> None:
        super().__init__(f"{kind} is {_short(value)}, recorded as {_short(expected)}")
        self.kind = kind
        self.value = value
        self.expected = expected


def is_guard(node: fx.Node) -> bool:
    """Tell whether a node asks a tensor for a value that the forward depends on."""
    return node.op == "call_function" and node.target is expect


# A compiler would break the graph in here, and in each frame around it: so it does it once.
@_disable_dynamo
def expect(kind: str, value: Any, expected: Any) -> None:
    """Ask a tensor for a value and compare it with the recorded answer.

    Parameters
    ----------
    kind : str
        ``"bool"``, ``"int"``, ``"float"``, ``"complex"``, ``"index"``, ``"item"``,
        ``"tolist"``, ``"numpy"`` ask `value`, a tensor; ``"shape"`` compares its shape;
        ``"value"`` takes `value`, a python object, as the answer.
    value : object
        A tensor or, for ``"value"``, what a recorded call returned.
    expected : object
        The recorded answer. Floats are compared by their bits: a NaN equals itself.

    Raises
    ------
    GuardMiss
        If the answers differ.
    """
    answer = ask(kind, value)
    if not same(answer, expected):
        raise GuardMiss(kind, answer, expected)


def ask(kind: str, value: Any) -> Any:
    """Return what python sees when it asks `value` for `kind`."""
    if kind == "value":
        return value
    if kind == "shape":
        return tuple(value.shape)
    if kind == "numpy":
        return freeze_array(value.detach().cpu().resolve_conj().resolve_neg().numpy())
    return _QUESTIONS[kind](value)


_QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "index": lambda value: value.__index__(),
    "item": lambda value: value.item(),
    "tolist": lambda value: value.tolist(),
}

ASKED = frozenset({*_QUESTIONS, "value", "shape", "numpy"})


def same(left: object, right: object) -> bool:
    """Whether two answers are equal to the bit.

    Examples
    --------
    >>> same(float("nan"), float("nan")), same(0.0, -0.0), same([1, 2.5], [1, 2.5])
    (True, False, True)
    """
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex) and isinstance(right, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(v, right[k]) for k, v in left.items())
    if isinstance(left, (torch.Tensor, np.ndarray)):
        return left is right
    return bool(left == right)


def freeze_array(array: np.ndarray[Any, Any]) -> tuple[str, tuple[int, ...], str]:
    """Turn an array into a plain value: dtype, shape and a digest of its bytes."""
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    return str(array.dtype), array.shape, digest


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
