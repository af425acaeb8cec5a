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
from autockpt.capture.paths import forward_of
from autockpt.capture.restore import RandomState
from autockpt.capture.untouched import Untouched
from autockpt.errors import (
    CaptureError,
    FallbackWarning,
    ForwardError,
    InfeasibleError,
    ProfileError,
)
from autockpt.modules.entry import ModuleEntry
from autockpt.modules.parts import install, mark, uninstall
from autockpt.modules.sharding import is_sharded, refuse_sharded, refuse_spread
from autockpt.modules.step import ModuleStep, plan_modules
from autockpt.modules.together import together
from autockpt.pipeline import Known, plan_step
from autockpt.reports.report import Report
from autockpt.runtime.bypass import originals
from autockpt.runtime.entry import Entry
from autockpt.runtime.ranks import bucket_bytes
from autockpt.settings import Settings
from autockpt.units import Budget, format_bytes
from solvers.plan import Plan
from solvers.problem import Problem

MAX_ENTRIES = 64
MAX_IDLE_MISSES = 3
MAX_MISSES = 6


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
        fallback: str | None = None,
    ) -> None:
        self.settings = settings
        # Why regions are calls of modules although that was not asked for.
        self._fallback = fallback
        # For the first step that is planned.
        self._given = given
        self._plan = plan
        self._report = report or Report(notes=("Plans at the first training forward.",))
        self._budget = budget
        # The entry used last comes first. Replaced, never changed: readers take no lock.
        self._entries: tuple[Entry | ModuleEntry, ...] = ()
        self._untouched = Untouched()
        self._idle_misses = 0
        self._misses = 0
        self._evicted = False
        # Whether steps that miss are recorded each time, as modules do not reach the budget.
        self._stays = False
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
        """The emitted forward as Python, or the list of modules that run again."""
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
        return _unpickle(*self._state())

    def __copy__(self) -> Handle:
        return self.fresh()

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        return self.fresh()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, self._state()

    def _state(self) -> tuple[Any, ...]:
        given, budget = self._given, self._budget
        return self.settings, self.plan, self.report, budget, given, self._fallback

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
        tried: list[Entry | ModuleEntry] = []
        missed: GuardMiss | None = None
        while True:
            entry = self._fitting(module, args, kwargs, tried)
            recorded = entry is None
            if entry is None and not tried and not _anything_to_train(module, args, kwargs):
                with originals():
                    return forward_of(module)(*args, **kwargs)
            if entry is None:
                entry = self._anew(module, args, kwargs, tried, missed)
            elif isinstance(entry, ModuleEntry) and entry.looks:
                entry = self._looked(module, args, kwargs, entry)
            try:
                output = entry.run(module, args, kwargs)
            except GuardMiss as miss:
                # Without its traceback, which holds this frame and all of the aborted forward.
                missed = miss.with_traceback(None)
                tried.append(entry)
            else:
                if not recorded:
                    self._hit(module, entry)
                return output

    def prepare(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Entry | ModuleEntry:
        """Record and plan a step, and keep it."""
        with self._lock:
            beside = {e.step.bucket_bytes for e in self._entries}
            if beside and bucket_bytes(module) not in beside:
                # The first call inside DistributedDataParallel: a share is one of more.
                self._budget = None
            entry = self._planned(module, tuple(args), dict(kwargs), self._known())
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
            _mark(module, entry)
            self._budget = self._budget or entry.step.budget
            self._given = None
        return entry

    def _known(self) -> Known:
        return Known(
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

    @property
    def over_modules(self) -> bool:
        """Whether regions are calls of modules, and the model's own Python runs."""
        return self.settings.emit == "modules" or self._fallback is not None

    def _planned(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Known,
    ) -> Entry | ModuleEntry:
        """Plan a step over its torch calls or, where they cannot be captured, over modules."""
        refuse_spread(module)
        if self.over_modules:
            return self._over_modules(module, args, kwargs, known, self._fallback)
        try:
            refuse_sharded(module)
            return Entry(plan_step(module, args, kwargs, self.settings, known))
        except ForwardError:
            raise
        except CaptureError as error:
            if self.settings.emit == "graph":
                raise
            try:
                return self._fall_back(module, args, kwargs, known, str(error))
            except CaptureError as other:
                # Neither way: what stands in the way of the usual one is what to change.
                self._withdraw(module)
                raise error from (None if str(other) == str(error) else other)
        except InfeasibleError as error:
            if self.settings.emit == "graph" or self.settings.solver != "auto":
                raise
            return self._reaching_lower(module, args, kwargs, known, error)

    def _reaching_lower(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Known,
        error: InfeasibleError,
    ) -> ModuleEntry:
        """Plan a step over modules that no regions of torch calls bring inside the budget.

        They lie between guards and writes, which a region of torch calls must not hold.
        """
        least = error.minimum_bytes
        reason = "Regions of torch calls do not reach the budget" + (
            f": they need {format_bytes(least, round_up=True)}." if least is not None else "."
        )
        try:
            entry = self._over_modules(module, args, kwargs, known, reason)
        except InfeasibleError as other:
            self._withdraw(module)
            if least is None or (other.minimum_bytes or least) >= least:
                raise error from None
            other.add_note(f"Regions are calls of modules here. {reason}")
            raise other from None
        except (CaptureError, ProfileError):
            self._withdraw(module)
            raise error from None
        if not self._entries:
            self._fallback = reason
        _warn_of_modules(module, reason)
        return entry

    def _withdraw(self, module: nn.Module) -> None:
        """Give modules their classes back, unless some step needs the others."""
        if not any(isinstance(entry, ModuleEntry) for entry in self._entries):
            uninstall(module)

    def _fall_back(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Known,
        reason: str,
    ) -> ModuleEntry:
        try:
            entry = self._over_modules(module, args, kwargs, known, reason)
        except InfeasibleError as error:
            error.add_note(f"Regions are calls of modules here, which can do less. {reason}")
            raise
        self._fallback = reason
        self._entries = ()
        _warn_of_modules(module, reason)
        return entry

    def _over_modules(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Known,
        reason: str | None,
        start: RandomState | None = None,
        beside: tuple[ModuleStep, ...] = (),
    ) -> ModuleEntry:
        install(module)
        notes = () if reason is None else (f"Regions are calls of modules. {reason}",)
        step = plan_modules(module, args, kwargs, self.settings, known, notes, start, beside)
        entry = ModuleEntry(together(module, (step, *beside)) if beside else (step,))
        # Its hooks gather parameters: nothing to take into a graph.
        entry.compiled.breaks |= is_sharded(module)
        return entry

    @_disable_dynamo
    def _fitting(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tried: Sequence[Entry | ModuleEntry],
    ) -> Entry | ModuleEntry | None:
        buckets = bucket_bytes(module)
        token = self._untouched.token(module) if self._entries else None
        for entry in self._entries:
            if entry.step.bucket_bytes != buckets or entry in tried:
                continue
            if entry.step.capture.key.matches(module, args, kwargs, token):
                return entry
        return None

    @_disable_dynamo
    def _looked(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], entry: ModuleEntry
    ) -> ModuleEntry:
        """Plan for one more kind of step, if there is one: see ``ModuleEntry.look``."""
        with self._lock:
            try:
                start = entry.look(module, args, kwargs)
                if start is None:
                    return entry
                more = self._over_modules(
                    module,
                    tuple(args),
                    dict(kwargs),
                    self._known(),
                    self._fallback,
                    start,
                    entry.steps,
                )
            except (ProfileError, CaptureError):
                # Someone else measures just now, say: training goes on, and another look may do.
                return entry
            _mark(module, more)
            self._entries = (more, *(e for e in self._entries if e is not entry))
            return more

    @_disable_dynamo
    def _anew(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tried: Sequence[Entry | ModuleEntry],
        missed: GuardMiss | None,
    ) -> Entry | ModuleEntry:
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
            if self._stays:
                # What was tried would miss again, each time after a part of a forward.
                self._entries = tuple(e for e in self._entries if e not in tried)
            if missed is None or isinstance(entry, ModuleEntry) or self._stays:
                return entry
            streams = {other.stream() for other in tried}
            enough = self._count_miss(missed, changed=entry.stream() not in streams)
            if enough is None:
                return entry
            if self.settings.emit == "graph":
                raise enough from missed
            known = Known(budget=self._budget)
            try:
                over = self._fall_back(module, tuple(args), dict(kwargs), known, str(enough))
            except InfeasibleError as error:
                self._stay(module, enough, error)
                return entry
            self._entries = (over,)
            _mark(module, over)
            return over

    def _stay(self, module: nn.Module, enough: CaptureError, error: InfeasibleError) -> None:
        """Keep recording each step: the budget holds, and time is what can be spared."""
        self._stays = True
        self._withdraw(module)
        more = error.minimum_bytes
        advice = "" if more is None else f" A memory_budget of {more} bytes would do for them."
        warnings.warn(
            f"{enough} Regions that are calls of modules, which would need no recording, do not "
            f"reach the budget, so each such step is recorded and planned before it runs, which "
            f"takes far longer than the step.{advice}",
            FallbackWarning,
            stacklevel=2,
        )

    def _count_miss(self, missed: GuardMiss, *, changed: bool) -> CaptureError | None:
        """Say whether it is enough: calls that miss one after the other are planned each time."""
        self._misses += 1
        self._idle_misses = 0 if changed else self._idle_misses + 1
        many = self._misses >= MAX_MISSES and self.settings.emit != "graph"
        if self._idle_misses < MAX_IDLE_MISSES and not many:
            return None
        times = self._misses if many else MAX_IDLE_MISSES
        how = "with other calls" if many else "each time with the same calls"
        self._idle_misses = self._misses = 0
        return CaptureError(
            f"The forward depends on a value that differs in every call: {missed}. It was "
            f"recorded {times} times in a row, {how}. "
            f"Keep that value in a tensor (no .item(), .tolist(), bool(...) of it), or "
            f"leave the part that asks for it out of the module that is optimized."
        )

    def _hit(self, module: nn.Module, entry: Entry | ModuleEntry) -> None:
        self._idle_misses = self._misses = 0
        if self._entries and self._entries[0] is not entry:
            with self._lock:
                _mark(module, entry)
                others = tuple(e for e in self._entries if e is not entry)
                self._entries = (entry, *others)[:MAX_ENTRIES]


def _warn_of_modules(module: nn.Module, reason: str) -> None:
    warnings.warn(
        f"{type(module).__name__} runs its own Python, and regions are calls of its modules, "
        f"which takes more recomputation than regions of torch calls. {reason} "
        f'emit="modules" asks for this and does not warn, emit="graph" refuses.',
        FallbackWarning,
        stacklevel=2,
    )


def _mark(module: nn.Module, entry: Entry | ModuleEntry) -> None:
    """Tell a compiler, which asks no caller, which modules are regions."""
    if isinstance(entry, ModuleEntry):
        mark(module, entry.step.regions.calls)


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
    fallback: str | None,
) -> Handle:
    return Handle(settings, plan=plan, report=report, budget=budget, given=given, fallback=fallback)


def _anything_to_train(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if any(parameter.requires_grad for parameter in module.parameters()):
        return True
    leaves = pytree.tree_leaves((args, kwargs))
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
