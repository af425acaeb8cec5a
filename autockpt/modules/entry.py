"""A planned step of a model whose own Python runs, and how it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo

from autockpt.capture.restore import RandomState
from autockpt.modules.compiled import Compiled
from autockpt.modules.parts import Caller, exchange
from autockpt.modules.rehearsal import plain_forward
from autockpt.modules.run import Run
from autockpt.modules.step import ModuleStep


@dataclass(slots=True, eq=False)
class ModuleEntry:
    """A planned step, as ``runtime.entry.Entry``.

    Attributes
    ----------
    step : ModuleStep
    most : int
        The most calls of modules in one forward that the plan knows of.
    fuller : RandomState or None
        What a forward found that made more.
    compiled : Compiled
        What a compiler makes of it that takes the whole forward as one graph.
    """

    step: ModuleStep
    most: int = 0
    fuller: RandomState | None = None
    compiled: Compiled = field(init=False)

    def __post_init__(self) -> None:
        self.most = sum(self.step.regions.counts.values())
        step = self.step
        # Modules that were not called have no place in its problem.
        self.compiled = Compiled(step.capture, step.problem, step.plan, breaks=step.uncalled)

    @_disable_dynamo(recursive=False)
    def run(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's own forward, the plan's modules under ``checkpoint``."""
        forward, before, run, start = self._begin(module)
        try:
            return forward(*args, **kwargs)
        finally:
            self._end(before, run, start)

    @_disable_dynamo
    def _begin(self, module: nn.Module) -> tuple[Any, Caller | None, Run | None, Any]:
        forward = plain_forward(module)
        if not self.step.regions.calls and not self.step.uncalled:
            return forward, exchange(None), None, None
        names = {id(part): name for name, part in module.named_modules()}
        run = Run(module, names, self.step.regions)
        start = RandomState() if self.step.uncalled else None
        return forward, exchange(run), run, start

    @_disable_dynamo
    def _end(self, before: Caller | None, run: Run | None, start: RandomState | None) -> None:
        exchange(before)
        if run is None or start is None:
            return
        made = sum(run.calls.values())
        if made > self.most:
            self.most, self.fuller = made, start

    def stream(self) -> tuple[str, ...]:
        """Which modules were called."""
        return tuple(self.step.regions.counts)
