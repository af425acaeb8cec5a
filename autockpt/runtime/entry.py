"""One planned step that can be called: a capture, its plan, its program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from autockpt.capture.calls import version
from autockpt.capture.guards import GuardMiss
from autockpt.capture.paths import read_path
from autockpt.capture.restore import put_back
from autockpt.lower import op_nodes
from autockpt.modules.compiled import Compiled
from autockpt.pipeline import Step
from autockpt.rewrite import is_guard


@dataclass(slots=True, eq=False)
class Entry:
    """A planned step, and how it is called.

    Attributes
    ----------
    step : Step
    compiled : Compiled
        What a compiler makes of it that does not take the emitted forward.
    """

    step: Step
    compiled: Compiled = field(init=False)
    _writes_before_guard: bool = field(init=False)

    def __post_init__(self) -> None:
        self._writes_before_guard = writes_before_guard(self.step)
        self.compiled = Compiled(self.step.capture, self.step.problem, self.step.plan)

    @_disable_dynamo(recursive=False)
    def run(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the emitted forward.

        Raises
        ------
        GuardMiss
            The recorded branch is not the one to take. Random state and buffers are as they
            were before the call.
        """
        tensors, before = self._begin(module, args, kwargs)
        try:
            outputs = self.step.program.forward(module, *tensors)
        except GuardMiss as miss:
            if before is not None:
                before.restore()
            # The traceback holds the frames, and they all tensors of the aborted forward.
            raise miss.with_traceback(None) from None
        return self._end(module, outputs)

    @_disable_dynamo
    def _begin(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[torch.Tensor, ...], _Before | None]:
        tensors = self.step.capture.inputs.tensors(args, kwargs)
        if not self.step.program.has_guards:
            return tensors, None
        writes = self.step.capture.writes if self._writes_before_guard else None
        return tensors, _Before.of(module, tensors, writes)

    @_disable_dynamo
    def _end(self, module: nn.Module, outputs: tuple[Any, ...]) -> Any:
        built = self.step.capture.outputs.build(outputs)
        if not self.step.capture.left:
            return built
        output, values = built
        for (path, name), value in zip(self.step.capture.left, values, strict=True):
            # Not through __setattr__, which would make a submodule's parameter of a Parameter.
            vars(module.get_submodule(path))[name] = value
        return output

    def stream(self) -> tuple[str, ...]:
        """Which calls were made, whatever their arguments."""
        return tuple(str(node.target) for node in op_nodes(self.step.capture.graph))


@dataclass(frozen=True, slots=True)
class _Before:
    """What a forward may have changed before its last guard."""

    tensors: tuple[tuple[torch.Tensor, torch.Tensor, int], ...]
    random: torch.Tensor
    device_random: dict[int, torch.Tensor]

    @classmethod
    def of(
        cls, module: nn.Module, inputs: Sequence[torch.Tensor], writes: Sequence[str] | None
    ) -> _Before:
        written: list[torch.Tensor] = []
        if writes is not None:
            others = (read_path(module, target) for target in writes)
            written = [*module.buffers(), *others, *inputs]
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        return cls(
            tensors=tuple((t, t.detach().clone(), version(t)) for t in written),
            random=torch.get_rng_state(),
            device_random={device: torch.cuda.get_rng_state(device) for device in devices},
        )

    def restore(self) -> None:
        torch.set_rng_state(self.random)
        for device, state in self.device_random.items():
            torch.cuda.set_rng_state(state, device)
        with torch.no_grad():
            for tensor, value, number in self.tensors:
                if tensor.is_leaf or not tensor.requires_grad:
                    put_back(tensor, value, number)


def writes_before_guard(step: Step) -> bool:
    """Tell whether an op before the last guard writes what was there before the step."""
    nodes = op_nodes(step.capture.graph)
    last = max((i for i, node in enumerate(nodes) if is_guard(node)), default=-1)
    problem = step.problem
    for index, node in enumerate(nodes[: last + 1]):
        if not node.meta.get("writes"):
            continue
        storages = (problem.values[value].storage for value in problem.ops[index].inputs)
        if any(problem.storages[storage].producer is None for storage in storages):
            return True
    return False
