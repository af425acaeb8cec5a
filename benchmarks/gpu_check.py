"""The promises on a CUDA device: ``python benchmarks/gpu_check.py``, in under four minutes.

Three models in training sizes at two budgets each, once in float32 and once under bfloat16
autocast. Every cell checks what the CPU demo does (budget held, bits equal), and what only a GPU
can show: the draws of CUDA's generator come back on recomputation, and the peak that was
predicted against the bytes that were requested of the allocator and those it handed out.

Prints a table, writes ``benchmarks/results/gpu_check.json``. Exit status: 0 if all holds, 1 if a
budget was exceeded or a bit differed, 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from autockpt.demo import BUDGETS, Example, MissingLibraryError, Row, examples, run, table
from autockpt.step import loss_of
from autockpt.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "gpu_check.json"
# No cell is started after this, so that the whole stays under four minutes.
LAST_START_SECONDS = 200.0


class Autocast(nn.Module):
    """A model under autocast, as training loops write it: around forward only."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", self.dtype):
            return self.inner(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A row of the demo, with what the allocator handed out."""

    precision: str
    row: Row
    allocated_bytes: int

    @property
    def ok(self) -> bool:
        """Whether the row is, and what was handed out is inside the budget too."""
        return self.row.ok and self.allocated_bytes <= self.row.budget_bytes

    def to_dict(self) -> dict[str, Any]:
        return self.row.to_dict() | {
            "precision": self.precision,
            "allocated_bytes": self.allocated_bytes,
            "ok": self.ok,
        }


def check(make: Callable[[], Example], budget: str, precision: str) -> Cell:
    """Run one cell in a clean allocator."""
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    example = make()
    if precision == "bf16 autocast":
        example = replace(example, model=Autocast(example.model, torch.bfloat16))
    # cuBLAS and cuDNN take their workspaces at the first step; they are not the plan's.
    _step(example, example.model)
    row, optimized = run(example, budget)
    return Cell(
        precision=precision, row=row, allocated_bytes=allocated_peak(example, optimized, row)
    )


def allocated_peak(example: Example, model: nn.Module, row: Row) -> int:
    """Return the peak of ``memory_allocated`` over a step, on the scale of the row's peaks."""
    _step(example, model)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _step(example, model)
    torch.cuda.synchronize()
    return row.fixed_bytes + torch.cuda.max_memory_allocated() - before


def _step(example: Example, model: nn.Module) -> None:
    loss_of(model(*example.args, **example.kwargs), example.loss).backward()


def allocator_table(cells: list[Cell]) -> Table:
    """Lay out predicted, requested and handed-out bytes."""
    shown = Table(title="The allocator")
    shown.add_column("model")
    shown.add_column("precision")
    for name in ("budget", "predicted", "requested", "allocated", "error", "regions", "planned in"):
        shown.add_column(name, justify="right")
    for cell in cells:
        row = cell.row
        shown.add_row(
            row.model,
            cell.precision,
            format_bytes(row.budget_bytes),
            format_bytes(row.predicted_bytes),
            format_bytes(row.measured_bytes),
            format_bytes(cell.allocated_bytes),
            f"{row.prediction_error:+.2%}",
            str(row.regions),
            f"{row.plan_seconds:.1f} s",
            style="" if cell.ok else "bold red",
        )
    return shown


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    output: Path = parser.parse_args(argv).output
    console = Console(highlight=False, width=120)
    if not torch.cuda.is_available():
        console.print("gpu_check needs a CUDA device, and torch sees none here.")
        return 2
    try:
        makers = examples("large", "cuda")
    except MissingLibraryError as error:
        console.print(str(error), markup=False)
        return 2
    started = time.perf_counter()
    cells: list[Cell] = []
    skipped: list[str] = []
    for precision in ("float32", "bf16 autocast"):
        for name, make in makers.items():
            for budget in BUDGETS:
                if time.perf_counter() - started > LAST_START_SECONDS:
                    skipped.append(f"{name} at {budget}, {precision}")
                    continue
                cells.append(check(make, budget, precision))
                console.print(f"{name} at {budget}, {precision}: {cells[-1].row.reason or 'ok'}")
    for precision in dict.fromkeys(cell.precision for cell in cells):
        console.print(f"\n{precision}")
        console.print(table(cell.row for cell in cells if cell.precision == precision))
    console.print(allocator_table(cells))
    if skipped:
        console.print(f"Not run for want of time: {'; '.join(skipped)}.")
    output.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
        "skipped": skipped,
        "cells": [cell.to_dict() for cell in cells],
    }
    output.write_text(json.dumps(result, indent=1))
    console.print(f"Written to {output}.")
    return 0 if cells and all(cell.ok for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
