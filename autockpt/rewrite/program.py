"""From a capture and a plan to a function that runs."""

from __future__ import annotations

import functools
import itertools
import linecache
import operator
import textwrap
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autockpt.capture.ambient import default_dtype
from autockpt.capture.captured import Capture
from autockpt.capture.guards import expect, is_guard
from autockpt.capture.mask_parts import SHOWN
from autockpt.regions.checkpointed import checkpointed
from autockpt.regions.guarded import Facts
from autockpt.regions.keeping import keeper, kept, replays, skipped
from autockpt.regions.remade import remade, taken
from autockpt.regions.statistics import statistic
from autockpt.rewrite.emit import Emitter
from autockpt.rewrite.expressions import Renderer
from autockpt.rewrite.lookups import Lookups
from autockpt.rewrite.names import common_prefix, place_of, region_name, unique
from autockpt.rewrite.scopes import Scope, is_live_read, scopes, written_statistics
from solvers.plan import Plan, Region

_PARTS = textwrap.fill(
    ", ".join(sorted(part.__name__ for part in SHOWN)) + ",",
    width=96,
    initial_indent="    ",
    subsequent_indent="    ",
)
HEADER = f"""\
import operator

import torch
import torch.nn.functional as F

from autockpt.capture.ambient import default_dtype
from autockpt.capture.guards import expect
from autockpt.capture.mask_parts import (
{_PARTS}
)
from autockpt.regions.checkpointed import checkpointed
from autockpt.regions.keeping import keeper, kept, replays, skipped
from autockpt.regions.remade import remade, taken
from autockpt.regions.statistics import statistic

"""
_serial = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Program:
    """An emitted forward.

    Attributes
    ----------
    code : str
        Its Python source.
    forward : callable
        ``forward(module, *input_tensors)`` gives the tuple of the model's output tensors. The
        module is the one whose parameters it reads, at every call.
    regions : tuple of str
        Names of the region functions, in the order of ``plan.walk()``.
    filename : str
        Where tracebacks and debuggers find the source.
    has_guards : bool
        Whether a call may end in a ``GuardMiss``.
    """

    code: str
    forward: Callable[..., tuple[Any, ...]]
    regions: tuple[str, ...]
    filename: str
    has_guards: bool


def rewrite(
    capture: Capture,
    plan: Plan,
    *,
    root: nn.Module | None = None,
    random: Collection[int] = (),
    idle: Mapping[Region, Collection[int]] | None = None,
    saving: Collection[int] | None = None,
    apart: bool = False,
) -> Program:
    """Emit the forward of a capture with the regions of a plan.

    Parameters
    ----------
    capture : Capture
    plan : Plan
        ``start`` and ``stop`` of its regions count the computing nodes of ``capture.graph``.
    root : nn.Module, optional
        The captured module: layers of a list are then written ``self.h[3]``.
    random : collection of int
        Indices of the ops that draw random numbers: only regions that hold one save and
        restore the generator state.
    idle : mapping from region to collection of int, optional
        Ops of each region that its recomputation leaves out, see ``solvers.idle_ops``; by
        default all run again.
    saving : collection of int, optional
        Indices of the ops that autograd saves something for: what is idle of the others, a replay
        just leaves out. By default all ops.
    apart : bool
        Whether what the capture took apart, dropout say, stays so where nobody needs the parts;
        by default it is called whole there, as the model does.

    Returns
    -------
    Program

    Raises
    ------
    PlanError
        A region reaches into the loss outside the model.

    Notes
    -----
    Every value is deleted after its last use, so that its memory is free when the memory
    model says so. Linear in the size of the graph times the depth of nesting.
    """
    ops = [node for node in capture.graph.nodes if node.op in ("call_function", "call_method")]
    emitted = sum(node.meta.get("stage", "model") == "model" for node in ops)
    returned = _model_outputs(capture.graph)
    outputs = [value for value in returned if isinstance(value, fx.Node)]
    forward = scopes(ops, emitted, outputs, plan, idle or {})

    namespace: dict[str, Any] = {
        "checkpointed": checkpointed,
        "default_dtype": default_dtype,
        "expect": expect,
        "F": torch.nn.functional,
        "keeper": keeper,
        "kept": kept,
        "operator": operator,
        "remade": remade,
        "replays": replays,
        "skipped": skipped,
        "taken": taken,
        "statistic": statistic,
        "torch": torch,
        "__name__": "autockpt.emitted",
    }
    renderer = Renderer(root, namespace)
    renderer.taken.update(("again", "keep", "replay"))
    for own in SHOWN:
        renderer.bind(own, own.__name__)
    placeholders = [node for node in capture.graph.nodes if node.op == "placeholder"]
    names = _declare(renderer, capture.graph, ops, forward)
    prologues = {
        (region.start, region.stop): unique(
            f"{names[region.start, region.stop]}_again", renderer.taken
        )
        for region in plan.regions
        if region.prologue
    }
    emitter = Emitter(
        ops=ops,
        renderer=renderer,
        regions=names,
        prologues=prologues,
        random=frozenset(random),
        used={node for op in ops[:emitted] for node in op.all_input_nodes} | set(outputs),
        ambient=capture.ambient,
        saving=range(len(ops)) if saving is None else frozenset(saving),
        apart=apart,
    )
    functions = [emitter.region(scope) for scope in forward.walk() if scope is not forward]
    functions.append(emitter.forward(forward, placeholders, returned))
    code = f"{HEADER}\n" + "\n\n".join(functions)
    function, filename = _compile(code, namespace, type(root).__name__ if root else "model")
    for region in plan.walk():
        name = names[region.start, region.stop]
        inside, again = ops[region.start : region.stop], [ops[i] for i in region.prologue]
        namespace[name].facts = _facts(name, inside, again, renderer)
    return Program(
        code=code,
        forward=function,
        regions=tuple(names[region.start, region.stop] for region in plan.walk()),
        filename=filename,
        has_guards=any(is_guard(op) for op in ops[:emitted]),
    )


def _facts(
    name: str, inside: Sequence[fx.Node], again: Sequence[fx.Node], renderer: Renderer
) -> Facts:
    """Say what a region reads on the live module besides what its replay writes on clones."""
    ops = [*again, *inside]
    written = {node for op in ops for node in written_statistics(op)}
    read = dict.fromkeys(node for op in ops for node in op.all_input_nodes if is_live_read(node))
    targets = [str(node.target) for node in read if node not in written]
    return Facts(
        name=name,
        place=place_of(inside),
        reads=tuple(targets),
        read=_reader(ops, targets, renderer),
        writes_statistics=bool(written),
    )


def _reader(
    ops: Sequence[fx.Node], targets: Collection[str], renderer: Renderer
) -> Callable[[nn.Module], tuple[torch.Tensor, ...]]:
    """Make the function that reads tensors of the live module, each layer looked up once."""
    lookups = Lookups(renderer, ops)
    names: dict[str, str] = {}
    taken = set(renderer.taken)
    body = []
    for op in ops:
        body += lookups.before(op)
        for node, text in lookups.texts(op).items():
            target = str(node.target)
            if target in targets and target not in names:
                names[target] = unique("tensor", taken)
                body.append(f"{names[target]} = {text}")
    found = "".join(f"{names.get(target) or renderer.path(target)}, " for target in targets)
    body.append(f"return ({found})")
    made: dict[str, Any] = {}
    exec("def read(self):\n" + "".join(f"    {line}\n" for line in body), renderer.namespace, made)
    read: Callable[[nn.Module], tuple[torch.Tensor, ...]] = made["read"]
    return read


def _model_outputs(graph: fx.Graph) -> tuple[Any, ...]:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    value: Any = output.args[0]
    return tuple(value[0])


def _declare(
    renderer: Renderer, graph: fx.Graph, ops: Sequence[fx.Node], forward: Scope
) -> dict[tuple[int, int], str]:
    """Name the variables, then the regions, which are globals beside them."""
    for node in graph.nodes:
        if node.op != "output" and not is_live_read(node):
            renderer.declare(node)
    modules = [str(node.meta.get("module", "")) for node in ops]
    prefix = common_prefix(modules)
    return {
        (scope.start, scope.stop): unique(
            region_name(modules[scope.start : scope.stop], prefix), renderer.taken
        )
        for scope in reversed(list(forward.walk()))
        if scope is not forward
    }


def _compile(
    code: str, namespace: dict[str, Any], title: str
) -> tuple[Callable[..., tuple[Any, ...]], str]:
    filename = f"<autockpt {title} {next(_serial)}>"
    exec(compile(code, filename, "exec"), namespace)
    # A compiler that inlines a function looks for the module of that name.
    del namespace["__name__"]
    # Tracebacks and debuggers look here for the source; no mtime means: never stale.
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    function: Callable[..., tuple[Any, ...]] = namespace["forward"]
    weakref.finalize(function, functools.partial(linecache.cache.pop, filename, None))
    return function, filename
