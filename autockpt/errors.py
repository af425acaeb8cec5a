"""Errors of the library. Solver errors live in ``solvers.errors`` and are re-exported."""

from __future__ import annotations

from solvers.errors import InfeasibleError, NoPlanFoundError, PlanError

__all__ = [
    "BudgetError",
    "CaptureError",
    "FallbackWarning",
    "ForwardError",
    "InfeasibleError",
    "NoPlanFoundError",
    "PlanError",
    "ProfileError",
    "RecomputationError",
]


class BudgetError(ValueError):
    """A memory budget that cannot be read, or that is out of range."""


class CaptureError(RuntimeError):
    """The model's forward cannot be captured faithfully; the message says why and where."""


class ForwardError(CaptureError):
    """The model's own forward, or the loss, failed; its error is the cause."""


class ProfileError(RuntimeError):
    """An op could not be measured; the message names it and the way out."""


class RecomputationError(RuntimeError):
    """A region did not compute in backward what it computed in forward; the message says which."""


class FallbackWarning(UserWarning):
    """A forward could not be captured as a graph: regions are calls of its modules instead."""
