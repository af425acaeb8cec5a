"""Train a model inside a number of bytes, to the same bits, at the least recomputation."""

from autockpt.api import minimum_budget, optimize
from autockpt.compare import compare
from autockpt.errors import (
    BudgetError,
    CaptureError,
    FallbackWarning,
    ForwardError,
    InfeasibleError,
    NoPlanFoundError,
    PlanError,
    ProfileError,
    RecomputationError,
)
from autockpt.holding import profile
from autockpt.step import measure
from autockpt.verify import verify
from solvers import Plan

__all__ = [
    "BudgetError",
    "CaptureError",
    "FallbackWarning",
    "ForwardError",
    "InfeasibleError",
    "NoPlanFoundError",
    "Plan",
    "PlanError",
    "ProfileError",
    "RecomputationError",
    "compare",
    "measure",
    "minimum_budget",
    "optimize",
    "profile",
    "verify",
]
