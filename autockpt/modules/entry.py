"""A planned step of a model whose own Python runs, and how it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autockpt.capture.restore import RandomState
from autockpt.modules.observe import plain_forward
from autockpt.modules.parts import calling
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
    """

    step: ModuleStep
    most: int = 0
    fuller: RandomState | None = None

    def __post_init__(self) -> None:
        self.most = sum(self.step.regions.counts.values())

    def run(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's own forward, the plan's modules under ``checkpoint``."""
        forward = plain_forward(module)
        if not self.step.regions.calls and not self.step.uncalled:
            return forward(*args, **kwargs)
        names = {id(part): name for name, part in module.named_modules()}
        run = Run(module, names, self.step.regions)
        start = RandomState() if self.step.uncalled else None
        with calling(run):
            output = forward(*args, **kwargs)
        if start is not None and (made := sum(run.calls.values())) > self.most:
            self.most, self.fuller = made, start
        return output

    def stream(self) -> tuple[str, ...]:
        """Which modules were called."""
        return tuple(self.step.regions.counts)
