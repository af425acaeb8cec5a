"""A step over torch calls or, where those cannot be had, over modules: as ``optimize`` plans it."""

from __future__ import annotations

from typing import Any

from torch import nn

from autockpt.before_guards import with_copies
from autockpt.capture import Capture
from autockpt.errors import CaptureError, ForwardError, ProfileError
from autockpt.lower import op_nodes
from autockpt.modules.parts import install
from autockpt.modules.step import lower_modules
from autockpt.pipeline import lower_step
from autockpt.profiler.cost import CostChoice
from autockpt.settings import Emit, Loss
from solvers import Plan, Problem, least_peak, simulate


def lower_either(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss | None,
    emit: Emit = "auto",
    cost: CostChoice = "roofline",
) -> tuple[Capture, Problem]:
    """Record and profile a step as ``optimize`` would: its torch calls, or calls of modules.

    Parameters
    ----------
    model : nn.Module
        A clone: its submodules may get the classes of ``parts``.
    args, kwargs, loss, emit, cost
        As for ``optimize``; nothing is timed.

    Raises
    ------
    CaptureError, ProfileError
    """
    if emit != "modules":
        try:
            return lower_step(model, args, kwargs, loss, cost, timed=False)
        except ForwardError:
            raise
        except CaptureError:
            if emit == "graph":
                raise
    install(model)
    return lower_modules(model, args, kwargs, loss)


def lower_least(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss | None,
    emit: Emit,
    cost: CostChoice,
) -> tuple[Capture, Problem, Plan]:
    """Give the step with its plan of least peak, over torch calls or modules as that is lower.

    Parameters and errors as for ``lower_either``. Modules are asked as well only where something
    keeps regions of torch calls apart that a module call may hold: elsewhere they win a few bytes
    at most, and take longer than the graph.
    """
    capture, problem = lower_either(model, args, kwargs, loss, emit, cost)
    found = [(capture, with_copies(capture, problem))]
    if emit == "auto" and _kept_apart(capture, problem):
        try:
            install(model)
            found.append(lower_modules(model, args, kwargs, loss))
        except (CaptureError, ProfileError):
            pass
    plans = [(*lowered, least_peak(lowered[1])) for lowered in found]
    return min(plans, key=lambda least: simulate(least[1], least[2]).peak_bytes)


def _kept_apart(capture: Capture, problem: Problem) -> bool:
    """Tell whether a graph has guards or writes in its forward."""
    if problem.spans is not None:
        return False
    nodes = zip(op_nodes(capture.graph), problem.ops, strict=True)
    pinned = any(op.pinned for node, op in nodes if node.meta.get("stage") != "loss")
    return pinned or not all(problem.boundaries)
