"""The command line: ``python -m autockpt``."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_COLUMNS = 110

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Train PyTorch models inside a memory budget, to the same bits."""


@app.command()
def demo() -> None:
    """Train GPT-2, a ResNet and a diffusion UNet inside two budgets each.

    Exits with 1 if any budget was exceeded or any bit differed, with 2 if the models' libraries
    are not installed.
    """
    # Imported here, so that --help answers at once.
    from autockpt import demo as show

    out = _console()
    try:
        makers = show.examples()
    except show.MissingLibraryError as error:
        out.print(str(error), markup=False)
        raise typer.Exit(2) from error
    torch.manual_seed(0)
    rows = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")
        for make in makers.values():
            for budget in show.BUDGETS:
                example = make()
                doing = f"{example.name} in {budget} of its activations"
                progress.update(task, description=doing)
                if not console.is_terminal:
                    console.print(f"{doing} ...")
                row, _ = show.run(example, budget)
                rows.append(row)
    out.print(show.table(rows))
    failed = [row for row in rows if not row.ok]
    for row in failed:
        out.print(f"{row.model} at {row.budget}: {row.reason}", markup=False)
    if failed:
        raise typer.Exit(1)
    out.print("Every peak is inside its budget, and every bit is equal to the plain step's.")


def _console() -> Console:
    # Where there is no terminal, rich takes 80 columns, and the table needs more.
    return Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS)
