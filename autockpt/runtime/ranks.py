"""Training on several ranks: a problem is solved once, and what DDP holds is counted.

Ranks agree through the key-value store that the process group was set up with, not through a
collective: a rank that plans alone (a teacher on rank 0, another shape of the last batch) waits
for nobody, and nobody waits for it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from solvers.plan import Plan

_PATIENCE = timedelta(minutes=10)
_NO_PLAN = b"none"


def agree(question: str, solve: Callable[[Plan | None], Plan]) -> Plan:
    """Let one rank solve, and give the others its plan.

    Parameters
    ----------
    question : str
        The problem, the budget, the solver: equal on ranks that may share a plan.
    solve : callable
        Gives a plan; is given the one of the rank that came first, or None.

    Notes
    -----
    The first rank that asks a question answers it. A rank whose problem is another one asks
    another question.
    """
    store = _store()
    if store is None:
        return solve(None)
    key = f"autockpt/{hashlib.sha256(question.encode()).hexdigest()}"
    if store.add(f"{key}/asked", 1) > 1:
        return solve(_answer(store, key))
    answer = _NO_PLAN
    try:
        plan = solve(None)
        answer = plan.to_json().encode()
        return plan
    finally:
        # Where it failed the others find out for themselves, and say so.
        store.set(key, answer)


def _answer(store: Any, key: str) -> Plan | None:
    try:
        store.wait([key], _PATIENCE)
    except RuntimeError:  # too long, or the rank that holds the store is gone
        warnings.warn(
            f"Another rank began to plan this step and has no plan after {_PATIENCE}: this rank "
            f"plans by itself.",
            stacklevel=2,
        )
        return None
    answer = store.get(key)
    return None if answer == _NO_PLAN else Plan.from_json(answer.decode())


def _store() -> Any:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if torch.compiler.is_compiling():
        return None
    return dist.distributed_c10d._get_default_store()


def bucket_bytes(module: nn.Module) -> int:
    """Give the bytes that DistributedDataParallel holds around a call of a module, besides it.

    Its buckets are a second copy of the gradients, unless those are views of the buckets.
    """
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None or wrapper.gradient_as_bucket_view:
        return 0
    trained = (p for p in module.parameters() if p.requires_grad)
    return sum(parameter.numel() * parameter.element_size() for parameter in trained)
