"""While a step is planned: optimized modules run their original forward, and nobody looks on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_local = threading.local()


@contextmanager
def originals() -> Iterator[None]:
    """Let the forward of every optimized module be the original one, in this thread."""
    _local.depth = getattr(_local, "depth", 0) + 1
    try:
        yield
    finally:
        _local.depth -= 1


def bypassed() -> bool:
    """Tell whether ``originals`` is in effect in this thread."""
    return getattr(_local, "depth", 0) > 0


@contextmanager
def unwatched() -> Iterator[None]:
    """Take saved-tensor hooks and dispatch modes in force off their stacks, and put them back.

    Offloading, a checkpoint of the user's around the model, a FLOP counter are for the real step
    alone; and under a dispatch mode autograd adds up gradients out of place.
    """
    stack: Any = torch._C._autograd
    taken = []
    while (hooks := stack._top_saved_tensors_default_hooks(True)) is not None:
        taken.append(hooks)
        stack._pop_saved_tensors_default_hooks()
    try:
        with _disable_current_modes():
            yield
    finally:
        for pack, unpack in reversed(taken):
            stack._push_saved_tensors_default_hooks(pack, unpack)
