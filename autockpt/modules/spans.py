"""From an observation to the problem whose only regions are calls of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import fx, nn

from autockpt.capture import Capture
from autockpt.capture.calls import STATISTICS
from autockpt.capture.guards import is_guard
from autockpt.lower import op_nodes
from autockpt.modules.observe import Observation
from autockpt.modules.rehearsal import neighbour
from autockpt.modules.run import Regions
from autockpt.modules.state import Effects
from solvers.problem import Problem, Span


def with_spans(problem: Problem, observed: Observation) -> Problem:
    """Name the module calls that may run again, of a forward that was looked at."""
    calls = {i: call.name for i, call in enumerate(observed.calls) if i not in observed.forbidden}
    return _with_spans(problem, op_nodes(observed.capture.graph), calls)


def compiled_spans(problem: Problem, capture: Capture) -> Problem:
    """Name the module calls that a compiler may run again, of a forward that was recorded.

    A guard is no op there: the compiler asks no tensor, or breaks the graph.
    """
    nodes = op_nodes(capture.graph)
    ops = (
        replace(op, pinned=False) if is_guard(node) else op
        for op, node in zip(problem.ops, nodes, strict=True)
    )
    calls = {i: name for i, name in enumerate(capture.calls) if name.partition(":")[0]}
    return _with_spans(replace(problem, ops=tuple(ops)), nodes, calls)


def _with_spans(problem: Problem, nodes: Sequence[fx.Node], calls: Mapping[int, str]) -> Problem:
    """Name the module calls that may run again.

    Left out are calls that save nothing, that hold an op which must not run again, that begin
    between an op and another that writes its result in place, and all but the outermost of
    those that hold the same ops.
    """
    spans: dict[tuple[int, int], Span] = {}
    for index, (start, stop) in sorted(_ranges(nodes).items()):
        inside = problem.ops[start:stop]
        wrong = (
            index not in calls
            or not problem.boundaries[start]
            or any(op.pinned for op in inside)
            or not any(op.packs or op.saved for op in inside)
        )
        if not wrong:
            spans.setdefault((start, stop), Span(name=calls[index], start=start, stop=stop))
    ordered = sorted(spans.values(), key=lambda span: (span.start, -span.stop))
    return replace(
        problem,
        # An end may lie before a write in place: the region makes that storage anew.
        boundaries=(True,) * len(problem.boundaries),
        spans=tuple(ordered),
    )


def _ranges(nodes: Sequence[fx.Node]) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for position, node in enumerate(nodes):
        for index in node.meta["calls"]:
            start, _ = found.get(index, (position, position))
            found[index] = start, position + 1
    return found


def _effects(model: nn.Module, observed: Observation, path: str) -> Effects:
    """Say what the calls of a module do besides computing."""
    written, plain = _written_buffers(observed)
    unseen = _unseen_buffers(model, observed)
    calls = [call for call in observed.calls if call.path == path]
    prefix = f"{path}."
    inside = [b for b in dict.fromkeys((*written, *unseen)) if b.startswith(prefix)]
    return Effects(
        buffers=tuple(b[len(prefix) :] for b in inside if b not in plain),
        statistics=tuple(b[len(prefix) :] for b in inside if b in plain),
        modules=tuple(dict.fromkeys(name for call in calls for name in call.modules)),
        arguments=any(call.arguments for call in calls),
    )


def copied_bytes(model: nn.Module, observed: Observation) -> int:
    """Give the bytes of buffers that regions copy when they begin, to begin again with them."""
    written, plain = _written_buffers(observed)
    names = {*written, *_unseen_buffers(model, observed)} - plain
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return sum(int(buffers[name].nbytes) for name in names if name in buffers)


def _written_buffers(observed: Observation) -> tuple[dict[str, None], set[str]]:
    """Buffers that were written, and those among them that are only ever updated by their op."""
    written: dict[str, None] = {}
    by_op: set[str] = set()
    read: set[str] = set()
    for node in op_nodes(observed.capture.graph):
        for source in node.all_input_nodes:
            if source.op != "get_attr" or source.meta.get("kind") != "buffer":
                continue
            name = str(source.target)
            if source not in node.meta["writes"]:
                read.add(name)
                continue
            written[name] = None
            if _is_norm(node):
                by_op.add(name)
            else:
                read.add(name)
    return written, by_op - read


def _is_norm(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") in STATISTICS


def _unseen_buffers(model: nn.Module, observed: Observation) -> list[str]:
    """Buffers of modules that were not called, and may be: they may be written then."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if path and path not in observed.called
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def call_of(name: str) -> tuple[str, int]:
    """Take the name of a call apart: the module's path, and how often it was called before."""
    path, _, number = name.partition(":")
    return path, int(number or 0)


def regions_of(
    model: nn.Module, observed: Sequence[Observation], names: Collection[str]
) -> Regions:
    """Say which calls of which modules are regions in forwards that were looked at.

    A module that was called in none of them is run as its neighbour in a list.

    Parameters
    ----------
    model : nn.Module
    observed : sequence of Observation
    names : collection of str
        The calls that are regions, named as in ``Span.name``.
    """
    chosen: dict[str, set[int]] = {}
    for name in names:
        path, number = call_of(name)
        chosen.setdefault(path, set()).add(number)
    calls = {path: frozenset(numbers) for path, numbers in chosen.items()}
    counts: Counter[str] = Counter()
    for one in observed:
        counts |= Counter(one.counts)
    called = dict(counts)
    for path, module in model.named_modules():
        if path and path not in called:
            other = neighbour(path, module, model, called)
            if other is not None and other in chosen:
                calls[path], counts[path] = calls[other], called[other]
    return Regions(
        calls=calls,
        counts=dict(counts),
        effects={path: _all_effects(model, observed, path) for path in calls},
        python=any(one.python for one in observed),
        device_types=observed[0].capture.key.device_types,
    )


def _all_effects(model: nn.Module, observed: Sequence[Observation], path: str) -> Effects:
    """Say what the calls of a module do in any forward; where it is called in none, may do."""
    calling = [one for one in observed if path in one.counts] or observed
    found = [_effects(model, one, path) for one in calling]
    buffers = dict.fromkeys(buffer for effects in found for buffer in effects.buffers)
    statistics = dict.fromkeys(buffer for effects in found for buffer in effects.statistics)
    modules = dict.fromkeys(name for effects in found for name in effects.modules)
    return Effects(
        buffers=tuple(buffers),
        statistics=tuple(buffer for buffer in statistics if buffer not in buffers),
        modules=tuple(modules),
        arguments=any(effects.arguments for effects in found),
    )
