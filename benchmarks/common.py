"""What the benchmarks share: measuring a model and writing tables."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from autockpt.profiler.aten_log import AtenLog
from autockpt.step import loss_of, undone
from tests.helpers import leaves
from tests.zoo import Case

RESULTS = Path(__file__).parent / "results"
MB = 1e6


def with_model(case: Case, model: nn.Module) -> Case:
    """The case with another model (an optimized one, one with checkpoints by hand)."""
    return case._replace(model=model)


def step(case: Case) -> None:
    """One forward and backward."""
    output = case.model(*case.args, **case.kwargs)
    loss_of(output, case.loss).backward()


def flops(case: Case) -> int:
    """FLOPs that a step really runs, attention on a CPU included."""
    with undone(case.model, list(leaves([case.args, case.kwargs]))), AtenLog() as log:
        step(case)
    return int(log.tally.flops)


def time_ratio(plain: Case, other: Case, pairs: int = 5) -> float:
    """Median ratio of step times, in interleaved pairs, each once in front of the other."""
    ratios = []
    tensors = list(leaves([plain.args, plain.kwargs]))
    with undone(plain.model, tensors), undone(other.model, tensors):
        for pair in range(pairs + 1):
            order = (plain, other) if pair % 2 else (other, plain)
            seconds = {id(case): _seconds(case) for case in order}
            ratios.append(seconds[id(other)] / seconds[id(plain)])
    return statistics.median(ratios[1:])


def _seconds(case: Case) -> float:
    start = time.perf_counter()
    step(case)
    return time.perf_counter() - start


def show(title: str, rows: Iterable[Mapping[str, Any]], name: str) -> None:
    """Print rows as a table and write them to ``results/NAME.json``."""
    rows = list(rows)
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    Console(width=160).print(table)
    RESULTS.mkdir(exist_ok=True)
    record = {"torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return "" if value is None else str(value)


def by_hand(make: Callable[[], Case], path: Sequence[str]) -> Case:
    """The case with each layer of the list at ``path`` under its own checkpoint, as people do."""
    from torch.utils.checkpoint import checkpoint

    case = make()
    owner: nn.Module = case.model
    for name in path:
        owner = getattr(owner, name)
    for layer in owner.children():
        plain = layer.forward

        def forward(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

        layer.forward = forward
    return case
