"""The one attribute of an optimized module: its plan, its programs, its settings."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from autockpt.capture.guards import GuardMiss
from autockpt.errors import CaptureError
from autockpt.pipeline import ForwardError, Known, plan_step
from autockpt.report import Report
from autockpt.runtime.bypass import originals
from autockpt.runtime.entry import Entry
from autockpt.runtime.ranks import bucket_bytes
from autockpt.settings import Settings
from autockpt.units import Budget
from solvers.plan import Plan
from solvers.problem import Problem

MAX_ENTRIES = 64
MAX_IDLE_MISSES = 3


class Handle:
    """What ``model.autockpt`` is.

    Attributes
    ----------
    settings : Settings
        The arguments of ``optimize``.
    plan : Plan or None
        The plan of the step that ran or was planned last; None before the first one.
    report : Report
        What it does.
    code : str
        The emitted forward as Python; empty before the first training forward.
    problem : Problem or None
        The graph problem that the plan solves.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        plan: Plan | None = None,
        report: Report | None = None,
        budget: Budget | None = None,
        given: Plan | None = None,
    ) -> None:
        self.settings = settings
        # For the first step that is planned.
        self._given = given
        self._plan = plan
        self._report = report or Report(notes=("Plans at the first training forward.",))
        self._budget = budget
        # The entry used last comes first. Replaced, never changed: readers take no lock.
        self._entries: tuple[Entry, ...] = ()
        self._idle_misses = 0
        self._evicted = False
        self._lock = threading.RLock()

    @property
    def plan(self) -> Plan | None:
        """The plan of the step that ran last."""
        return self._entries[0].step.plan if self._entries else self._plan

    @property
    def report(self) -> Report:
        """What the plan does, for people."""
        return self._entries[0].step.report if self._entries else self._report

    @property
    def code(self) -> str:
        """The emitted forward as Python."""
        return self._entries[0].step.program.code if self._entries else ""

    @property
    def problem(self) -> Problem | None:
        """The graph problem that the plan solves."""
        return self._entries[0].step.problem if self._entries else None

    def __repr__(self) -> str:
        return f"<autockpt.Handle: {len(self._entries)} planned steps>"

    def note(self, text: str) -> None:
        """Say something in the report."""
        self._report = replace(self._report, notes=(text,))

    def fresh(self) -> Handle:
        """Give a handle for a copy of the module: same settings and plan, nothing recorded."""
        return _unpickle(self.settings, self.plan, self.report, self._budget, self._given)

    def __copy__(self) -> Handle:
        return self.fresh()

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        return self.fresh()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.settings, self.plan, self.report, self._budget, self._given)

    # Under torch.compile this frame is not compiled, the emitted forward below it is.
    @_disable_dynamo(recursive=False)
    def run(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a training forward of ``module``, planned.

        Raises
        ------
        CaptureError, InfeasibleError
            If the call is new and cannot be planned.
        """
        _refuse_transforms()
        tried: list[Entry] = []
        missed: GuardMiss | None = None
        while True:
            entry = self._fitting(module, args, kwargs, tried)
            recorded = entry is None
            if entry is None and not tried and not _anything_to_train(module, args, kwargs):
                with originals():
                    return module.forward(*args, **kwargs)
            if entry is None:
                entry = self._anew(module, args, kwargs, tried, missed)
            try:
                output = entry.run(module, args, kwargs)
            except GuardMiss as miss:
                # Without its traceback, which holds this frame and all of the aborted forward.
                missed = miss.with_traceback(None)
                tried.append(entry)
            else:
                if not recorded:
                    self._hit(entry)
                return output

    def prepare(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry:
        """Record and plan a step, and keep it."""
        with self._lock:
            known = Known(
                given=self._given,
                plans=(
                    *(e.step.plan for e in self._entries),
                    *([self._plan] if self._plan else ()),
                ),
                budget=self._budget,
                checked=frozenset(e.step.capture.signature for e in self._entries),
                forms={
                    e.step.capture.signature: e.step.gradient_forms
                    for e in self._entries
                    if e.step.gradient_forms is not None
                },
            )
            entry = Entry(plan_step(module, tuple(args), dict(kwargs), self.settings, known))
            if len(self._entries) == MAX_ENTRIES and not self._evicted:
                self._evicted = True
                warnings.warn(
                    f"This model has been called in more than {MAX_ENTRIES} different ways "
                    f"(shapes, modes, arguments): the ones used longest ago are recorded again "
                    f"when they come back, which takes far longer than a step. Pad or bucket "
                    f"the batches to fewer shapes.",
                    stacklevel=2,
                )
            self._entries = (entry, *self._entries)[:MAX_ENTRIES]
            self._budget = self._budget or entry.step.budget
            self._given = None
        return entry

    @_disable_dynamo
    def _fitting(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tried: Sequence[Entry],
    ) -> Entry | None:
        buckets = bucket_bytes(module)
        for entry in self._entries:
            if entry.step.bucket_bytes != buckets or entry in tried:
                continue
            if entry.step.capture.key.matches(module, args, kwargs):
                return entry
        return None

    @_disable_dynamo
    def _anew(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tried: Sequence[Entry],
        missed: GuardMiss | None,
    ) -> Entry:
        with self._lock:
            # Another thread may have planned it while this one waited.
            entry = self._fitting(module, args, kwargs, tried)
            if entry is not None:
                return entry
            try:
                entry = self.prepare(module, args, kwargs)
            except ForwardError as error:
                # In training, the model's own error is what its callers know.
                raise (error.__cause__ or error) from None
            streams = {other.stream() for other in tried}
            self._count_miss(missed, changed=entry.stream() not in streams)
            return entry

    def _count_miss(self, missed: GuardMiss | None, *, changed: bool) -> None:
        self._idle_misses = 0 if missed is None or changed else self._idle_misses + 1
        if self._idle_misses >= MAX_IDLE_MISSES:
            self._idle_misses = 0
            raise CaptureError(
                f"The forward depends on a value that differs in every call: {missed}. It was "
                f"recorded {MAX_IDLE_MISSES} times in a row, each time with the same calls. "
                f"Keep that value in a tensor (no .item(), .tolist(), bool(...) of it), or "
                f"leave the part that asks for it out of the module that is optimized."
            ) from missed

    def _hit(self, entry: Entry) -> None:
        self._idle_misses = 0
        if self._entries and self._entries[0] is not entry:
            with self._lock:
                others = tuple(e for e in self._entries if e is not entry)
                self._entries = (entry, *others)[:MAX_ENTRIES]


@_disable_dynamo
def _refuse_transforms() -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise CaptureError(
            "The optimized model is called inside a torch.func transform (grad, vmap, jvp), which "
            "allows no checkpoints. Transform the model that was passed to optimize, or call this "
            "one under torch.no_grad()."
        )


def _unpickle(
    settings: Settings,
    plan: Plan | None,
    report: Report | None,
    budget: Budget | None,
    given: Plan | None,
) -> Handle:
    return Handle(settings, plan=plan, report=report, budget=budget, given=given)


def _anything_to_train(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if any(parameter.requires_grad for parameter in module.parameters()):
        return True
    leaves = pytree.tree_leaves((args, kwargs))
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
