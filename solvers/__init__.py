"""Solvers of the checkpoint placement problem, without torch.

>>> sorted(SOLVERS)[:3]
['auto', 'checkmate', 'chen_greedy']
"""

from solvers.bounds import bound, peak_bound
from solvers.checkmate import Schedule, best_schedule
from solvers.dispatch import SOLVERS, Solver, solve
from solvers.errors import InfeasibleError, NoPlanFoundError, PlanError
from solvers.minimum import least_peak
from solvers.plan import Plan, Region
from solvers.prediction import Prediction
from solvers.problem import Gradient, Op, Problem, Storage, Value
from solvers.simulate import idle_ops, simulate

__all__ = [
    "SOLVERS",
    "Gradient",
    "InfeasibleError",
    "NoPlanFoundError",
    "Op",
    "Plan",
    "PlanError",
    "Prediction",
    "Problem",
    "Region",
    "Schedule",
    "Solver",
    "Storage",
    "Value",
    "best_schedule",
    "bound",
    "idle_ops",
    "least_peak",
    "peak_bound",
    "simulate",
    "solve",
]
