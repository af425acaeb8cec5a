"""stub"""
from __future__ import annotations
from contextlib import contextmanager
from typing import Any
import torch
class Trace:
    def before_write(self, t: Any) -> None: ...
    def verify(self, refuse: Any) -> None: ...
@contextmanager
def untraced(model: Any, args: Any, kwargs: Any) -> Any:
    with torch.random.fork_rng():
        yield Trace()
