"""The arguments that a forward is called with, as a user hands them over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def checked_batch(args: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments.

    Raises
    ------
    TypeError
        If they are not a list or tuple and a mapping: one tensor alone would be taken apart.
    """
    if not isinstance(args, (list, tuple)):
        raise TypeError(
            f"args is a {type(args).__name__}, not the sequence of the forward's positional "
            f"arguments: write (x,) for one, and kwargs={{...}} for those with names."
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(
            f"kwargs is a {type(kwargs).__name__}, not a mapping from names of the forward's "
            f"arguments to their values."
        )
    return tuple(args), dict(kwargs or {})
