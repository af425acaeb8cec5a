"""Under torch.compile: the planned forward is traced where the model is called, without a break.

Dynamo traces Python, and what decides between planned steps (identities, attributes of all
modules) is not for tracing. So it is decided once, while tracing, on the real module and the fake
inputs, and becomes a guard of the compiled code: a change of the module is found at the next call,
as in eager mode. What no compiler takes whole in an emitted forward (a value that Python asks for,
an output of an unusual class) it may take in the model's own Python, which often asks no such thing
while it is traced: that is traced then, with calls of modules as regions. Where neither can be had
(nothing planned yet, a forward that breaks the graph by itself) Dynamo breaks the graph, and the
call is looked up or planned eagerly.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._dynamo.comptime import comptime
from torch._dynamo.guards import install_guard
from torch._dynamo.variables.functions import UserFunctionVariable

from autockpt.capture.tree import source_of
from autockpt.modules.traced import OwnPython
from autockpt.runtime.entry import Entry

if TYPE_CHECKING:
    from autockpt.modules.entry import ModuleEntry
    from autockpt.runtime.handle import Handle


class _Unknown(Exception):
    """An argument that tracing does not know by value."""


def forward(
    handle: Handle, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run a training forward; this function is traced, not run."""
    planned: Any = None
    own: Any = None
    # Puts a function there where the call is known.
    comptime(_look)
    if planned is not None:
        return planned(module, args, kwargs)
    if own is not None:
        return own(plain, module, args, kwargs)
    return _eagerly(handle, module, args, kwargs)


@torch._dynamo.disable(  # type: ignore[untyped-decorator]
    recursive=False,
    reason="autockpt plans a step on real tensors before it can be traced: for fullgraph=True give "
    "optimize() a batch, or call the optimized model once before it is compiled. A forward that "
    "is no single graph without autockpt is none with it",
)
def _eagerly(handle: Handle, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return handle.run(module, args, kwargs)


def _look(context: Any) -> None:
    """Find the planned step while Dynamo traces ``forward`` above."""
    tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    here = tracer.symbolic_locals
    handle, module, source = here["handle"].value, here["module"].value, here["module"].source
    try:
        args, kwargs = _known(here["args"]), _known(here["kwargs"])
    except _Unknown:
        return
    entry = handle._fitting(module, args, kwargs, ())
    if entry is None:
        # The call plans it; the next one is traced again.
        _guard(source, _as_many_entries(handle))
        return
    planned = _planned(entry, args, kwargs)
    if planned is not None:
        here["planned"] = UserFunctionVariable(planned)
    elif not entry.compiled.breaks:
        here["own"] = OwnPython.of(module, entry.compiled)
    else:
        return
    _guard(source, entry.step.capture.key.model_matches)


def _as_many_entries(handle: Handle) -> Callable[[nn.Module], bool]:
    """Make a guard that fails when a step was planned; it lives longer than the model may."""
    count, reference = len(handle._entries), weakref.ref(handle)

    def holds(_: nn.Module) -> bool:
        now = reference()
        return now is not None and len(now._entries) == count

    return holds


def _known(variable: Any) -> Any:
    """Give an argument as it is known to Dynamo: tensors are fake, all else is real.

    To look at a value is what makes Dynamo guard it.
    """
    variable = variable.realize()
    if variable.is_tensor():
        return variable.as_proxy().node.meta["example_value"]
    try:
        return variable.as_python_constant()
    except NotImplementedError:  # a tensor in it
        kind = variable.python_type()
    if kind in (list, tuple):
        return kind(map(_known, variable.items))
    if kind is dict:
        return {key.vt.as_python_constant(): _known(item) for key, item in variable.items.items()}
    raise _Unknown


def _planned(
    entry: Entry | ModuleEntry, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> types.FunctionType | None:
    """Write the function that takes the call apart, runs the program and builds the output."""
    if not isinstance(entry, Entry):
        return None
    capture = entry.step.capture
    if entry.step.program.has_guards or capture.left:
        return None
    space: dict[str, Any] = {"planned": entry.step.program.forward}
    output = source_of(capture.outputs, "tensors", space)
    inputs = capture.inputs.sources(len(args), kwargs)
    if output is None or inputs is None:
        return None
    lines = [
        "def call(module, args, kwargs):",
        f"    tensors = planned(module, {', '.join(inputs)})",
        f"    return {output}",
    ]
    exec("\n".join(lines), space)
    call: types.FunctionType = space["call"]
    return call


def _guard(source: Any, holds: Callable[[nn.Module], bool]) -> None:
    """Have the compiled code ask about the module before each call."""

    def create(builder: Any, guard: Any) -> None:
        manager = builder.get_guard_manager(guard)
        manager.add_lambda_guard(holds, ["autockpt: the model is as it was planned"], None)

    install_guard(source.make_guard(create))
