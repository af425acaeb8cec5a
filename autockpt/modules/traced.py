"""Under torch.compile: a model's own Python is traced, calls of its modules are checkpoints.

The part of the planned step that is not for tracing (which calls are regions) is asked for while
Dynamo traces, and leaves neither ops nor guards of its own: whoever traces the root guards that
the plan holds.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch._dynamo.comptime import comptime
from torch._dynamo.exc import RestartAnalysis, Unsupported
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker
from torch._dynamo.variables.functions import UserFunctionVariable

from autockpt.modules.parts import Forward, install, region_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autockpt.modules.compiled import Compiled

_local = threading.local()


@dataclass(slots=True, eq=False)
class _Tracing:
    """One forward of a root while it is traced: as ``run.Run`` where it is run."""

    names: Mapping[int, str]
    compiled: Compiled
    regions: frozenset[str]
    calls: dict[str, int] = field(default_factory=dict)
    inside: str | None = None

    def enters(self, module: nn.Module) -> bool:
        """Count a call, and say whether it is a region."""
        path = self.names.get(id(module))
        if path is None:
            return False
        number = self.calls.get(path, 0)
        self.calls[path] = number + 1
        name = f"{path}:{number}" if number else path
        if self.inside is not None or name not in self.regions:
            return False
        self.inside = path
        return True


class OwnPython(UserFunctionVariable):
    """What Dynamo takes for a root's own forward; its modules ask here what they are."""

    # Dynamo looks for variables of its own in all other attributes.
    _nonvar_fields = {*UserFunctionVariable._nonvar_fields, "tracing"}  # noqa: RUF012

    def __init__(self, tracing: _Tracing, **options: Any) -> None:
        assert isinstance(own_python, types.FunctionType)
        super().__init__(own_python, **options)
        self.tracing = tracing

    @classmethod
    def of(cls, module: nn.Module, compiled: Compiled) -> OwnPython:
        """Prepare a model to be traced."""
        regions = compiled.regions()
        if regions and install(module):
            # Dynamo may know some of its modules by their class already.
            raise RestartAnalysis(restart_reason="autockpt: modules became regions")
        names = {id(part): name for name, part in module.named_modules()}
        return cls(_Tracing(names, compiled, regions))

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        """Trace the forward; note what cannot be traced, so that another way is taken."""
        tracing, log = self.tracing, tx.speculation_log
        start = log.index
        try:
            with _asked(tracing):
                result = super().call_function(tx, args, kwargs)
        except Unsupported as reason:
            if tracing.inside is not None:
                # It may be that only a checkpoint does not take it: then the next trace gets
                # through.
                tracing.compiled.exclude(tracing.inside, str(reason).partition("\n")[0])
            else:
                tracing.compiled.breaks = True
                if tx.one_graph:
                    raise
                # The next trace makes another call in place of this one.
                start -= 1
        else:
            if not tracing.compiled.probing:
                return result
            tracing.compiled.probed()
        # Dynamo expects to meet again what it met before, as far as that was.
        del log.entries[start:]
        raise RestartAnalysis(restart_reason="autockpt: other modules are regions")


def own_python(
    plain: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the forward that the user wrote; this function is traced, not run."""
    return plain(module, *args, **kwargs)


def part(plain: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a submodule's forward; this function is traced, not run."""
    region: Any = False
    comptime(_enter)
    if not region:
        return plain(module, *args, **kwargs)
    result = region_of(plain, module, args, kwargs)
    comptime(_leave)
    return result


def _enter(context: Any) -> None:
    tracing: _Tracing | None = getattr(_local, "tracing", None)
    here = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().symbolic_locals
    if tracing is not None and tracing.enters(here["module"].realize().value):
        here["region"] = ConstantVariable.create(True)
        # A number that varies must be known outside the checkpoint before it is read inside.
        for given in ("args", "kwargs"):
            here[given] = LazyVariableTracker.realize_all(here[given])


def _leave(_: Any) -> None:
    _local.tracing.inside = None


@contextmanager
def _asked(tracing: _Tracing) -> Iterator[None]:
    before = getattr(_local, "tracing", None)
    _local.tracing = tracing
    try:
        yield
    finally:
        _local.tracing = before
