"""While a module is recorded, every optimized module runs its original forward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
