"""The calls that users make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autockpt.batch import checked_batch
from autockpt.capture.clone import clone_module
from autockpt.errors import CaptureError
from autockpt.holding import MemoryProfile, describe
from autockpt.modules.either import lower_least
from autockpt.modules.parts import install
from autockpt.modules.sharding import refuse_wrapped
from autockpt.profiler.cost import CostChoice
from autockpt.runtime.handle import Handle
from autockpt.runtime.swap import adopt, release
from autockpt.settings import (
    Emit,
    Loss,
    Settings,
    budget_for,
    check_loss_argument,
    check_reserve,
)
from solvers import Plan, Solver, simulate

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def optimize(
    model: ModuleT,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory_budget: SupportsIndex | str,
    loss: Loss | None = None,
    solver: str | Solver = "auto",
    cost: CostChoice = "time",
    emit: Emit = "auto",
    reserve: int = 0,
    solve_seconds: float | None = None,
    plan: Plan | None = None,
) -> ModuleT:
    """Give the same model back, training to the same bits inside a number of bytes.

    Parameters
    ----------
    model : nn.Module
        Untouched. The result shares its parameters and buffers.
    args, kwargs : sequence, mapping
        One batch: the step is planned now. Without any, at the first training forward.
    memory_budget : int or str
        What the peak of a training step must not exceed: bytes, ``"6GiB"``, or ``"50%"``, the
        fixed bytes and that share of the plain step's activations.
    loss : callable, optional
        ``loss(outputs) -> scalar``, counted with the model. None: the output's ``.loss``, else
        a scalar output, else the sum of all differentiable floating outputs.
    solver : str or callable
        A name in ``solvers.SOLVERS``, or ``(problem, budget_bytes) -> Plan``.
    cost : {"time", "roofline"} or callable
        What running an op again is said to cost: measured ns, ns from FLOPs and bytes, or a
        function of an ``OpWork``.
    emit : {"auto", "graph", "modules"}
        What regions are. ``"graph"``: runs of torch calls, in a forward that is emitted anew.
        ``"modules"``: calls of submodules, while the model's own Python runs; for what cannot
        be captured as a graph, and for FSDP. ``"auto"``: the first, and where that refuses, or
        has no plan for the budget, the second, with a ``FallbackWarning``.
    reserve : int
        Bytes to leave free inside the budget, for what lies outside the model and its loss.
    solve_seconds : float, optional
        Time limit of ``"auto"``, ``"ilp"`` (20 s by default) and ``"checkmate"`` (60 s by
        default), which then return the best plan found by then (status ``"time limit"``); if
        there is none, they go on until there is. The other solvers are quick by themselves.
    plan : Plan, optional
        A plan made before, for the same model and a batch like this one
        (``Plan.from_json(text)``): taken as it is, and nothing is solved. Other calls of the
        model are planned as usual.

    Returns
    -------
    nn.Module
        Of the same class. Everything of ours is at ``.autockpt``: ``plan``, ``report``,
        ``code``.

    Raises
    ------
    TypeError, BudgetError, ValueError
        Arguments that are wrong for every model, before any work is done.
    CaptureError
        The forward cannot be captured, or fails on this batch.
    ProfileError
        An op cannot be measured, for want of memory say.
    InfeasibleError
        No plan fits; says how many bytes would do.
    PlanError
        The plan that was given, or that the given solver returned, is wrong.

    Notes
    -----
    Gradients, outputs, buffers and random state are those of the plain model, bit for bit.
    Planning runs the forward without grad a few times (seven for a first plan), and leaves no
    trace.

    Examples
    --------
    >>> layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]
    >>> model = optimize(
    ...     nn.Sequential(*layers), (torch.ones(4096, 64),), memory_budget="60%", cost="roofline"
    ... )
    >>> len(model.autockpt.plan.regions) > 0
    True
    >>> model(torch.ones(4096, 64)).sum().backward()
    """
    settings = Settings(
        memory_budget=memory_budget,
        loss=loss,
        solver=solver,
        cost=cost,
        emit=emit,
        reserve=reserve,
        solve_seconds=solve_seconds,
    )
    settings.check()
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan={plan!r} is a {type(plan).__name__}, not a solvers.Plan.")
    _check_model(model)
    batch = checked_batch(args, kwargs)
    handle = Handle(settings, given=plan)
    optimized = adopt(release(clone_module(model)), handle)
    if emit == "modules":
        # Before fully_shard, which makes classes on top of these.
        install(optimized)
    if not _anything_trains(model, batch):
        handle.note("No parameter and no input requires grad: there is nothing to plan.")
    elif any(batch):
        handle.prepare(optimized, *batch)
    return optimized


class MinimumBudget(int):
    """Bytes, as an int, and what holds them.

    Attributes
    ----------
    holding : MemoryProfile
        What is alive at the peak of the least plan, largest first: where to save.
    """

    holding: MemoryProfile

    def __new__(cls, nbytes: int, holding: MemoryProfile) -> MinimumBudget:
        """Make the int, with its attribute."""
        self = super().__new__(cls, nbytes)
        self.holding = holding
        return self

    def __getnewargs__(self) -> tuple[int, MemoryProfile]:  # type: ignore[override]
        """Copy and pickle with the attribute."""
        return int(self), self.holding


def minimum_budget(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    cost: CostChoice = "time",
    emit: Emit = "auto",
    reserve: int = 0,
) -> MinimumBudget:
    """Give the least ``memory_budget``, in bytes, for which ``optimize`` finds a plan.

    Parameters
    ----------
    model, args, kwargs, loss, cost, emit, reserve
        As for ``optimize``. ``cost`` tells which graph is planned, and nothing is timed.

    Returns
    -------
    MinimumBudget
        An int: bytes, fixed bytes, margin and reserve included. Its ``holding`` says what is
        alive at that peak, who saved it and where.

    Examples
    --------
    >>> layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]
    >>> least = minimum_budget(nn.Sequential(*layers), (torch.ones(4096, 64),))
    >>> least >= least.holding.peak_bytes
    True
    """
    check_loss_argument(loss)
    check_reserve(reserve)
    _check_model(model)
    batch = checked_batch(args, kwargs)
    clone = release(clone_module(model))
    capture, problem, plan = lower_least(clone, *batch, loss, emit, cost)
    least_peak_bytes = simulate(problem, plan).peak_bytes
    nbytes = budget_for(least_peak_bytes, problem.fixed_bytes, reserve)
    return MinimumBudget(nbytes, describe(problem, plan, capture))


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not a torch.nn.Module.")
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if isinstance(model, wrappers):
        name = type(model).__name__
        raise CaptureError(f"The model is wrapped in {name}. Optimize first: {name}(optimize(m)).")
    refuse_wrapped(model)
    foreign = isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod")
    if "forward" in vars(model) and not foreign:
        raise CaptureError(
            f"The forward of this {type(model).__name__} was replaced on the object (model.forward "
            f"= ..., as accelerator.prepare does), where it would hide the planned one. Optimize "
            f"first and wrap then; a forward of your own belongs on a class: optimize a subclass."
        )


def _anything_trains(model: nn.Module, batch: Any) -> bool:
    leaves = (*model.parameters(), *pytree.tree_leaves(batch))
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
