"""Errors of planning."""

from __future__ import annotations


class PlanError(ValueError):
    """A plan is malformed, or was made for another problem."""


class InfeasibleError(RuntimeError):
    """No schedule fits the budget.

    Attributes
    ----------
    budget_bytes : int
        What was asked for.
    minimum_bytes : int or None
        The least peak for which a plan was found.
    bound_bytes : int or None
        The peak below which no schedule of any kind exists.
    op : str
        Where the peak of the least plan is: module path and source line.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        minimum_bytes: int | None = None,
        bound_bytes: int | None = None,
        op: str = "",
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.bound_bytes = bound_bytes
        self.op = op


class NoPlanFoundError(InfeasibleError):
    """No plan was found for the budget, though none is proven impossible."""
