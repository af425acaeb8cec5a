"""A planned step of a model whose own Python runs, and how it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autockpt.modules.observe import plain_forward
from autockpt.modules.parts import calling
from autockpt.modules.run import Run
from autockpt.modules.step import ModuleStep


@dataclass(frozen=True, slots=True, eq=False)
class ModuleEntry:
    """A planned step, as ``runtime.entry.Entry``."""

    step: ModuleStep

    def run(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's own forward, the plan's modules under ``checkpoint``."""
        forward = plain_forward(module)
        if not self.step.regions.calls:
            return forward(*args, **kwargs)
        names = {id(part): name for name, part in module.named_modules()}
        with calling(Run(module, names, self.step.regions)):
            return forward(*args, **kwargs)

    def stream(self) -> tuple[str, ...]:
        """Which modules were called."""
        return tuple(self.step.regions.counts)
