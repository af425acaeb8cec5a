"""What holds the memory of a training step: every storage alive at the peak, and who kept it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from torch import nn

from autockpt.batch import checked_batch
from autockpt.capture import Capture
from autockpt.capture.clone import clone_module
from autockpt.lower import op_nodes
from autockpt.modules.either import lower_either
from autockpt.profiler.cost import CostChoice
from autockpt.reports.layers import file_and_line, layer_pattern, name_together
from autockpt.reports.tables import to_text
from autockpt.runtime.swap import ATTRIBUTE, is_optimized, release
from autockpt.settings import Emit, Loss
from autockpt.units import format_bytes
from solvers.judge.holding import Held, alive_at_peak
from solvers.plan import Plan
from solvers.problem import Op, Problem

_SHOWN = 25
# Below, numbers are left out of the table: eight bytes each.
_SHOWN_SHARE = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One storage that is alive at the peak.

    Attributes
    ----------
    nbytes : int
    share : float
        Of all that is alive above the fixed bytes.
    why : str
        ``"saved"`` by autograd for a backward; ``"region input"`` of a checkpoint;
        ``"recomputed"``; ``"output"`` that the caller holds; ``"in use"`` by the forward at
        this instant; ``"random state"`` that a checkpoint keeps.
    saved_by : tuple of str
        The functions that keep it: ``"torch.nn.functional.gelu"``.
    module, source : str
        Dotted path of the module that keeps it, and the user's line, ``path/file.py:12``.
    made_by : str
        The function that made it.
    made_module, made_source : str
        Where that was.
    shape, dtype : tuple of int, str
        Of the tensor that was made with it; empty for what no tensor of the forward shows
        (an attention's scores, a mask of dropout).
    """

    nbytes: int
    share: float
    why: str
    saved_by: tuple[str, ...]
    module: str
    source: str
    made_by: str
    made_module: str
    made_source: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """All that is alive at the peak of one training step. The parts add up to the peak.

    Attributes
    ----------
    rows : tuple of MemoryRow
        Largest first.
    peak_bytes : int
        Predicted, fixed bytes included.
    fixed_bytes : int
        There at the start of the step.
    parameter_bytes, buffer_bytes, batch_bytes, resident_gradient_bytes : int
        What the fixed bytes are.
    gradient_bytes : int
        Gradients that backward has in flight, or has finished where they are fresh.
    workspace_bytes : int
        What the op that runs needs for itself.
    number_bytes : int
        Python numbers that autograd has saved.
    gradients : {"resident", "fresh"}
        Which of the two ways of training has this peak, the higher one.
    phase : {"forward", "backward", "recompute"}
    op, module, source : str
        The op that runs at the peak, and where.
    regions : int
        Checkpoints of the plan; 0 for the plain step.
    """

    rows: tuple[MemoryRow, ...]
    peak_bytes: int
    fixed_bytes: int
    parameter_bytes: int
    buffer_bytes: int
    batch_bytes: int
    resident_gradient_bytes: int
    gradient_bytes: int
    workspace_bytes: int
    number_bytes: int
    gradients: str
    phase: str
    op: str
    module: str
    source: str
    regions: int = 0

    @property
    def activation_bytes(self) -> int:
        """All that is alive above the fixed bytes."""
        return self.peak_bytes - self.fixed_bytes

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as plain data, one dict a storage."""
        return [asdict(row) for row in self.rows]

    def to_csv(self) -> str:
        """Write the rows as CSV with a header; several functions are parted by spaces."""
        out = io.StringIO()
        writer = csv.DictWriter(out, MemoryRow.__dataclass_fields__, lineterminator="\n")
        writer.writeheader()
        for row in self.to_dicts():
            shape = "x".join(map(str, row["shape"]))
            writer.writerow(row | {"saved_by": " ".join(row["saved_by"]), "shape": shape})
        return out.getvalue()

    def to_json(self) -> str:
        """Write everything, rows included, as JSON."""
        return json.dumps(asdict(self), indent=1)

    def __rich__(self) -> RenderableType:
        return Group(_heading(self), _row_table(self), _part_table(self))

    def __str__(self) -> str:
        return to_text(self)


def profile(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
) -> MemoryProfile:
    """Say what holds the memory of a training step, without running one.

    Parameters
    ----------
    model : nn.Module
        Plain: the step without checkpoints is looked at. From ``optimize``: the step under
        its plan. Left as it is, either way.
    args, kwargs : sequence, mapping
        One batch. An optimized model that has planned a step needs none.
    loss : callable, optional
        As for ``optimize``; an optimized model brings its own.

    Returns
    -------
    MemoryProfile
        Prints as a table, largest first, what is alike grouped.

    Raises
    ------
    TypeError
        If ``model`` is not a module.
    CaptureError, ProfileError
        The forward cannot be captured, or an op of it cannot be run.
    PlanError
        This batch takes another path through an optimized model than the planned one.

    Notes
    -----
    Takes two forwards without grad, and each distinct op apart: a model whose training step
    does not fit the device is profiled on it all the same, and a model on ``meta`` without any
    memory (there without the workspaces of ops). The peak is the one that ``optimize`` plans
    with: gradients, workspaces and what autograd saves, to the byte, are replayed.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    >>> found = profile(model, (torch.ones(4096, 64),))
    >>> [(row.saved_by, row.module, row.made_by) for row in found.rows[:1]]
    [(('torch.nn.functional.gelu',), '1', 'torch.nn.functional.linear')]
    >>> rest = found.gradient_bytes + found.workspace_bytes
    >>> found.activation_bytes == rest + sum(row.nbytes for row in found.rows)
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not a torch.nn.Module.")
    plan = Plan()
    emit: Emit = "auto"
    cost: CostChoice = "roofline"
    batch = checked_batch(args, kwargs)
    if is_optimized(model):
        handle = getattr(model, ATTRIBUTE)
        plan = handle.plan or plan
        loss = handle.settings.loss if loss is None else loss
        emit = "modules" if handle.over_modules else emit
        cost = handle.settings.cost
        if not args and not kwargs and handle.problem is not None:
            return describe(handle.problem, plan)
    clone = release(clone_module(model))
    capture, problem = lower_either(clone, *batch, loss, emit, cost)
    return describe(problem, plan, capture)


def describe(problem: Problem, plan: Plan, capture: Capture | None = None) -> MemoryProfile:
    """Take the predicted peak of a plan apart; shapes are known with the capture only."""
    holding = alive_at_peak(problem, plan)
    tensors = _Tensors(problem, capture)
    whole = holding.level_bytes - holding.fixed_bytes
    rows = [_row(problem, held, whole, tensors) for held in holding.held if held.nbytes]
    at = problem.ops[holding.op] if problem.ops else Op(name="")
    return MemoryProfile(
        rows=tuple(sorted(rows, key=lambda row: -row.nbytes)),
        peak_bytes=holding.level_bytes,
        fixed_bytes=holding.fixed_bytes,
        parameter_bytes=problem.parameter_bytes,
        buffer_bytes=problem.buffer_bytes,
        batch_bytes=problem.batch_bytes,
        resident_gradient_bytes=problem.gradient_bytes if holding.resident else 0,
        gradient_bytes=holding.gradient_bytes,
        workspace_bytes=holding.workspace_bytes,
        number_bytes=holding.number_bytes,
        gradients="resident" if holding.resident else "fresh",
        phase=holding.phase,
        op=at.target,
        module=at.module,
        source=at.source,
        regions=sum(1 for _ in plan.walk()),
    )


class _Tensors:
    """Shape and dtype of the tensor that a storage was made with, where one shows it."""

    def __init__(self, problem: Problem, capture: Capture | None) -> None:
        self._found: dict[int, tuple[tuple[int, ...], str]] = {}
        if capture is None:
            return
        for op, node in zip(problem.ops, op_nodes(capture.graph), strict=True):
            metas = node.meta.get("tensors", ())
            if len(metas) != len(op.outputs):
                continue
            for value, meta in zip(op.outputs, metas, strict=True):
                entry = (tuple(meta.shape), str(meta.dtype).removeprefix("torch."))
                self._found.setdefault(problem.values[value].storage, entry)

    def of(self, storage: int | None) -> tuple[tuple[int, ...], str]:
        return self._found.get(-1 if storage is None else storage, ((), ""))


def _row(problem: Problem, held: Held, whole: int, tensors: _Tensors) -> MemoryRow:
    producer = None if held.storage is None else problem.storages[held.storage].producer
    maker = Op(name="") if producer is None else problem.ops[producer]
    keepers = [problem.ops[index] for index in held.by]
    where = keepers[0] if keepers else maker
    shape, dtype = tensors.of(held.storage)
    return MemoryRow(
        nbytes=held.nbytes,
        share=held.nbytes / whole if whole else 0.0,
        why=held.why,
        saved_by=tuple(dict.fromkeys(op.target for op in keepers)),
        module=where.module,
        source=where.source,
        made_by=maker.target,
        made_module=maker.module,
        made_source=maker.source,
        shape=shape,
        dtype=dtype,
    )


# Tables


def _heading(profile: MemoryProfile) -> str:
    step = f"{profile.regions} checkpoints" if profile.regions else "without checkpoints"
    source = f", {file_and_line(profile.source)}" if profile.source else ""
    return (
        f"Peak of a training step, {step}: {format_bytes(profile.peak_bytes)} predicted, in "
        f"{profile.phase} at {profile.module or _short(profile.op)}{source}. "
        f"{format_bytes(profile.activation_bytes)} of it come and go with the step:"
    )


def _row_table(profile: MemoryProfile) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("bytes", "share", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why it is alive", overflow="fold")
    table.add_column("module", overflow="fold")
    table.add_column("source", no_wrap=True)
    groups = _groups(profile.rows)
    for rows in groups[:_SHOWN]:
        table.add_row(*_cells(rows))
    for cells in _other_cells(profile, groups[_SHOWN:]):
        table.add_row(*cells)
    return table


def _groups(rows: tuple[MemoryRow, ...]) -> list[list[MemoryRow]]:
    """Group what repeated layers hold alike; the most bytes first."""
    groups: dict[tuple[object, ...], list[MemoryRow]] = {}
    for row in rows:
        key = (layer_pattern(row.module), row.source, row.why, row.saved_by, row.made_source)
        groups.setdefault((*key, row.made_by, row.nbytes), []).append(row)
    return sorted(groups.values(), key=lambda group: -sum(row.nbytes for row in group))


def _cells(rows: list[MemoryRow]) -> tuple[str, ...]:
    first = rows[0]
    return (
        format_bytes(sum(row.nbytes for row in rows)),
        f"{sum(row.share for row in rows):.1%}",
        str(len(rows)),
        _reason(first),
        name_together([row.module for row in rows]),
        file_and_line(first.source),
    )


def _reason(row: MemoryRow) -> str:
    text = row.why
    if row.why == "saved":
        text = "saved by " + ", ".join(map(_short, row.saved_by))
    made = _short(row.made_by)
    if not made or text == f"saved by {made}":
        return text
    return f"{text}, made by {made}"


def _other_cells(
    profile: MemoryProfile, rest: Sequence[Sequence[MemoryRow]]
) -> Iterator[tuple[str, ...]]:
    def cells(nbytes: int, count: str, what: str) -> tuple[str, ...]:
        share = nbytes / profile.activation_bytes if profile.activation_bytes else 0.0
        return (format_bytes(nbytes), f"{share:.1%}", count, what, "", "")

    if rest:
        rows = [row for group in rest for row in group]
        yield cells(sum(row.nbytes for row in rows), str(len(rows)), "smaller ones")
    if profile.gradient_bytes:
        yield cells(profile.gradient_bytes, "", "gradients in flight")
    if profile.workspace_bytes:
        yield cells(profile.workspace_bytes, "", f"workspace of {_short(profile.op)}")
    if profile.number_bytes >= _SHOWN_SHARE * profile.activation_bytes > 0:
        yield cells(profile.number_bytes, "", "Python numbers that autograd saves")


def _part_table(profile: MemoryProfile) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    parts = {
        "there before the step": profile.fixed_bytes,
        "  parameters": profile.parameter_bytes,
        "  gradients": profile.resident_gradient_bytes,
        "  buffers": profile.buffer_bytes,
        "  batch": profile.batch_bytes,
    }
    for name, nbytes in parts.items():
        if nbytes:
            table.add_row(name, format_bytes(nbytes))
    return table


def _short(target: str) -> str:
    return target.rsplit(".", 1)[-1]
