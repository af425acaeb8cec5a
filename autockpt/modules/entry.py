"""A planned step of a model whose own Python runs, and how it is called."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from autockpt.capture.refusals import drop, gone
from autockpt.capture.restore import RandomState
from autockpt.modules.compiled import Compiled
from autockpt.modules.kinds import Kind, Trail
from autockpt.modules.observe import drawn
from autockpt.modules.parts import Caller, Forward, calling, exchange
from autockpt.modules.rehearsal import plain_forward
from autockpt.modules.run import Run
from autockpt.modules.sharding import looked_at
from autockpt.modules.step import ModuleStep
from autockpt.modules.unwritten import unwritten
from autockpt.pipeline import PLANNING
from autockpt.runtime.bypass import originals, unwatched

MAX_KINDS = 16
MAX_LOOKS = 16


@dataclass(slots=True, eq=False)
class ModuleEntry:
    """A planned step, as ``runtime.entry.Entry``; one for all kinds of steps at its shapes.

    Attributes
    ----------
    steps : tuple of ModuleStep
        One for each kind that is planned for, all with the same regions.
    step : ModuleStep
        Of the kind that ran last.
    looks : int
        How many of the next steps are to be looked at before they run, as one ran that was of
        no known kind.
    compiled : Compiled
        What a compiler makes of it that takes the whole forward as one graph.
    """

    steps: tuple[ModuleStep, ...]
    step: ModuleStep = field(init=False)
    looks: int = 0
    compiled: Compiled = field(init=False)
    _kinds: tuple[Kind, ...] = field(init=False)
    # What the step of no known kind began with: draws may have decided what it called.
    _missed: RandomState | None = None
    _said: bool = False

    def __post_init__(self) -> None:
        self.step = step = self.steps[0]
        self._kinds = tuple(one.observed.trail.kind(step.regions) for one in self.steps)
        # Modules that were not called have no place in its problem.
        breaks = step.observed.uncalled or len(self.steps) > 1
        self.compiled = Compiled(step.capture, step.problem, step.plan, breaks=breaks)

    @_disable_dynamo(recursive=False)
    def run(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's own forward, the plan's modules under ``checkpoint``."""
        forward, before, run, start = self._begin(module)
        try:
            return forward(*args, **kwargs)
        finally:
            self._end(before, run, start)

    @_disable_dynamo
    def _begin(self, module: nn.Module) -> tuple[Any, Caller | None, Run, RandomState]:
        run = Run(module, _names(module), self.step.regions)
        start = RandomState()
        return plain_forward(module), exchange(run), run, start

    @_disable_dynamo
    def _end(self, before: Caller | None, run: Run, start: RandomState) -> None:
        exchange(before)
        known = self._known(run.trail)
        if known is not None:
            self.step = known
        elif len(self.steps) < MAX_KINDS:
            self.looks, self._missed = MAX_LOOKS, start
        elif not self._said:
            self._said = True
            warnings.warn(
                f"{type(run.root).__name__} has called its modules in more than {MAX_KINDS} "
                f"different ways on batches of one shape. Regions were chosen for the first "
                f"{MAX_KINDS} of them: steps that hold more than these may exceed the budget.",
                stacklevel=2,
            )

    def _known(self, trail: Trail) -> ModuleStep | None:
        """Give the step that was planned for what a forward called."""
        for step in (self.step, *self.steps):
            if step.observed.trail == trail:
                return step
        kind = trail.kind(self.step.regions)
        pairs = zip(self.steps, self._kinds, strict=True)
        return next((step for step, known in pairs if known.covers(kind)), None)

    def look(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> RandomState | None:
        """Run a call ahead, to find a step that is to be planned for before it runs.

        Returns
        -------
        RandomState or None
            That under which this batch makes a step of no known kind: the current one, or the
            one that the step began with which gave cause to look.
        """
        self.looks -= 1
        missed, self._missed = self._missed, None
        for start in filter(None, (RandomState(), missed)):
            with PLANNING, originals(), unwatched(), looked_at(module), drawn(start):
                trail = self._trail(module, tuple(args), dict(kwargs))
            if self._known(trail) is None:
                return start
        return None

    def _trail(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trail:
        looker = _Looker(module, _names(module), self.step.regions)
        hooks = torch.autograd.graph.saved_tensors_hooks(drop, gone)
        with unwritten(module, args, kwargs), hooks, calling(looker):
            plain_forward(module)(*args, **kwargs)
        return looker.trail

    def stream(self) -> tuple[str, ...]:
        """Which modules were called."""
        return tuple(self.step.regions.counts)


def _names(module: nn.Module) -> dict[int, str]:
    return {id(part): name for name, part in module.named_modules()}


class _Looker(Run):
    """The caller that writes down what is called, and makes no regions."""

    def _region(
        self,
        path: str,
        module: nn.Module,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        return forward(module, *args, **kwargs)
