"""One planned step that can be called: a capture, its plan, its program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._compile import _disable_dynamo

from autockpt.before_guards import written_before_guards
from autockpt.capture.calls import version
from autockpt.capture.guards import GuardMiss
from autockpt.capture.paths import read_path
from autockpt.capture.restore import put_back
from autockpt.lower import op_nodes
from autockpt.modules.compiled import Compiled
from autockpt.pipeline import Step


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
    _written: tuple[fx.Node, ...] = field(init=False)

    def __post_init__(self) -> None:
        nodes = op_nodes(self.step.capture.graph)
        self._written = written_before_guards(nodes, self.step.problem)
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
        placeholders = (n for n in self.step.capture.graph.nodes if n.op == "placeholder")
        given = dict(zip(placeholders, tensors, strict=True)) if self._written else {}
        return tensors, _Before.of(
            given[node] if node in given else read_path(module, str(node.target))
            for node in self._written
        )

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
    def of(cls, written: Iterable[torch.Tensor]) -> _Before:
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
