"""One trial: an optimized model against the plain one over two steps, and how it went."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autockpt
from autockpt.runtime.handle import Handle
from autockpt.step import loss_of
from autockpt.verify import same_bits
from solvers import Plan, Problem, Region
from solvers.problem import Span
from tests.costs import dear_draws

Kind = Literal[
    "graph",
    "modules",
    "refused",
    "wrong",
    "over budget",
    "crashed",
    "no plain step",
    "not a function",
]
BAD: tuple[Kind, ...] = ("wrong", "over budget", "crashed")
REFUSALS = (autockpt.CaptureError, autockpt.ProfileError, autockpt.InfeasibleError)
AMPLE = 2**40


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How it went.

    Attributes
    ----------
    name : str
    kind : str
        What regions are, if bits are equal; else what was found instead. ``"no plain step"``:
        the plain model raises; ``"not a function"``: the plain model differs from itself
        (uninitialised memory). Neither says anything about us.
    reason : str
        Of a refusal; or what differs.
    recomputed : int
        Ops inside regions of a plan that costs anything.
    covered : bool
        Whether all of the module that the trial is about lies inside regions.
    infeasible : bool
        Whether it was refused because no plan fits.
    minimum_bytes : int
        The budget that such a refusal names.
    peak_bytes, budget_bytes : int
        Measured and asked for, where there was a budget.
    """

    name: str
    kind: Kind
    reason: str = ""
    recomputed: int = 0
    covered: bool = False
    infeasible: bool = False
    minimum_bytes: int = 0
    peak_bytes: int = 0
    budget_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, its batch and its loss.

    ``focus`` is the path of the module that the trial is about; its ops should run again.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    loss: Callable[[Any], Tensor] | None = None
    focus: str = ""


def everything(problem: Problem, _: int) -> Plan:
    """A solver: put all that may run again into as few regions as there can be."""
    if problem.spans is not None:
        return Plan(regions=_spans(problem, lambda _: True))
    return Plan.flat(_runs(problem, len(problem.ops)))


def pieces(problem: Problem, _: int) -> Plan:
    """A solver: put all that may run again into regions of few ops, the smallest modules."""
    if problem.spans is not None:
        holds = {a for a in problem.spans for b in problem.spans if a is not b and _within(b, a)}
        return Plan(regions=_spans(problem, lambda span: span not in holds))
    return Plan.flat(_runs(problem, 2))


def nested(problem: Problem, _: int) -> Plan:
    """A solver: regions over everything, with small ones inside."""
    outer, inner = everything(problem, 0), pieces(problem, 0)
    return Plan(
        regions=tuple(
            replace(region, children=tuple(r for r in inner.regions if _inner(r, region)))
            for region in outer.regions
        )
    )


SOLVERS = {solver.__name__: solver for solver in (everything, pieces, nested)}


def _runs(problem: Problem, most: int) -> Iterator[tuple[int, int]]:
    """Runs of ops, of about `most`, between pinned ones and edges that are allowed."""
    start = None
    for index in range(len(problem.ops) + 1):
        pinned = index == len(problem.ops) or problem.ops[index].pinned
        if start is not None and problem.boundaries[index]:
            if index > start and (pinned or index - start >= most):
                yield start, index
                start = None
        elif pinned:
            # A stretch that cannot be cut runs into it.
            start = None
        if start is None and not pinned and problem.boundaries[index]:
            start = index


def _spans(problem: Problem, wanted: Callable[[Span], bool]) -> tuple[Region, ...]:
    """Regions of the first wanted spans that do not overlap."""
    regions: list[Region] = []
    for span in problem.spans or ():
        if wanted(span) and (not regions or span.start >= regions[-1].stop):
            regions.append(Region(start=span.start, stop=span.stop, module=span.name))
    return tuple(regions)


def _within(inner: Span, outer: Span) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def _inner(inner: Region, outer: Region) -> bool:
    strict = (inner.start, inner.stop) != (outer.start, outer.stop)
    return strict and outer.start <= inner.start and inner.stop <= outer.stop


def attempt(
    name: str,
    subject: Subject,
    *,
    emit: str = "auto",
    budget: int | str = 0,
    solver: Callable[[Problem, int], Plan] = everything,
) -> Trial:
    """Optimize a copy, with given regions or for a budget, and compare two steps.

    Parameters
    ----------
    name : str
    subject : Subject
    emit : str
        As for ``optimize``.
    budget : int or str
        0: an ample one, and ``solver`` says what the regions are.
    solver : callable
    """
    plain = copy.deepcopy(subject.model)
    again = copy.deepcopy(subject.model)
    try:
        expected = list(steps(plain, subject))
    except Exception as error:  # noqa: BLE001, whatever the plain model raises
        return Trial(name=name, kind="no plain step", reason=_said(error))
    if differences(expected, list(steps(again, subject))):
        return Trial(name=name, kind="not a function")
    try:
        return _judged(name, subject, expected, emit, budget, solver)
    except REFUSALS as error:
        infeasible = isinstance(error, autockpt.InfeasibleError)
        least = getattr(error, "minimum_bytes", None) or 0
        return Trial(
            name=name,
            kind="refused",
            reason=_said(error),
            infeasible=infeasible,
            minimum_bytes=least,
        )
    except Exception as error:  # noqa: BLE001, a crash is what is looked for
        return Trial(name=name, kind="crashed", reason=_said(error))


def _judged(
    name: str,
    subject: Subject,
    expected: Sequence[Any],
    emit: str,
    budget: int | str,
    solver: Callable[[Problem, int], Plan],
) -> Trial:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autockpt.FallbackWarning)
        model = _optimized(subject, emit, memory_budget=budget or AMPLE)
        if not budget:
            problem = cast(Handle, model.autockpt).problem
            assert problem is not None
            plan = solver(problem, AMPLE)
            model = _optimized(subject, emit, memory_budget=AMPLE, plan=plan)
        wrong = differences(expected, list(steps(model, subject)))
    if wrong:
        return Trial(name=name, kind="wrong", reason=", ".join(wrong[:4]))
    handle = cast(Handle, model.autockpt)
    recomputed, covered = _inside(handle, subject.focus)
    kind: Kind = "modules" if handle.over_modules else "graph"
    reason = next((n for n in handle.report.notes if n.startswith("Regions are calls")), "")
    trial = Trial(name=name, kind=kind, recomputed=recomputed, covered=covered, reason=reason)
    return trial if not budget else _weighed(trial, model, subject)


def _weighed(trial: Trial, model: nn.Module, subject: Subject) -> Trial:
    """Measure the peak."""
    seen = autockpt.verify(
        subject.model, model, subject.args, dict(subject.kwargs or {}), loss=subject.loss
    )
    allowed = seen.budget_bytes or 0
    trial = replace(trial, peak_bytes=seen.peak_bytes, budget_bytes=allowed)
    if seen.within_budget:
        return trial
    over = seen.peak_bytes - allowed
    reason = f"{over} bytes over, {over / max(1, allowed - seen.fixed_bytes):.2%} of activations"
    return replace(trial, kind="over budget", reason=reason)


def _optimized(subject: Subject, emit: str, **how: Any) -> nn.Module:
    return autockpt.optimize(
        subject.model,
        _fresh(subject.args),
        _fresh(dict(subject.kwargs or {})),
        loss=subject.loss,
        cost=dear_draws,
        emit=emit,  # type: ignore[arg-type]
        **how,
    )


def _inside(handle: Handle, focus: str) -> tuple[int, bool]:
    """Ops inside regions, and whether all of a module's are."""
    plan, problem = handle.plan, handle.problem
    if plan is None or problem is None:
        return 0, False
    inside = {i for region in plan.regions for i in range(region.start, region.stop)}
    of_focus = {
        i for i, op in enumerate(problem.ops) if f"{op.module}.".startswith(f"{focus}.") and op.cost
    }
    return len(inside) if plan.recompute_cost else 0, bool(of_focus) and of_focus <= inside


def steps(model: nn.Module, subject: Subject, number: int = 2) -> Iterator[dict[str, Any]]:
    """Run steps with resident gradients from fixed random states; yield what each leaves."""
    model.zero_grad(set_to_none=True)
    args, kwargs = _fresh(subject.args), _fresh(dict(subject.kwargs or {}))
    for step in range(number):
        seed(step)
        # Integers of the second batch are those of the first: what they index is not known.
        output = model(*args, **kwargs)
        value = loss_of(output, subject.loss)
        value.backward()
        left: dict[str, Any] = {"loss": value.detach().clone()}
        for index, leaf in enumerate(pytree.tree_leaves(_plain(output))):
            left[f"output {index}"] = leaf.detach().clone() if _is_tensor(leaf) else leaf
        for name, parameter in model.named_parameters():
            left[f"gradient of {name}"] = _copied(parameter.grad)
        for name, buffer in model.named_buffers():
            left[f"buffer {name}"] = buffer.detach().clone()
        for index, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
            if _is_tensor(leaf):
                left[f"input {index}"] = leaf.detach().clone()
                left[f"gradient of input {index}"] = _copied(leaf.grad)
        left["random state"] = torch.get_rng_state()
        left["random state of python"] = random.getstate()
        left["random state of numpy"] = np.random.get_state()[1].tolist()  # type: ignore[index]
        yield left


def seed(number: int) -> None:
    """Seed all generators that a model may draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def differences(expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[str]:
    """Names of what is not equal to the bit, with the number of the step."""
    wrong = []
    for number, (first, second) in enumerate(zip(expected, found, strict=True)):
        if list(first) != list(second):
            wrong.append(f"step {number}: other things are left")
        wrong += [
            f"step {number}: {key}"
            for key in first
            if key in second and not same_bits(first[key], second[key])
        ]
    return wrong


def _plain(output: Any) -> Any:
    """Outputs of transformers and diffusers as plain containers."""
    if isinstance(output, Mapping):
        return {key: _plain(value) for key, value in output.items()}
    if hasattr(output, "__dataclass_fields__"):
        return {key: _plain(value) for key, value in vars(output).items()}
    return output


def _fresh(tree: Any) -> Any:
    """The same arguments in other tensors, those that want gradients as leaves."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copied, tree)


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _said(error: BaseException) -> str:
    first, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first}"
