"""The notebooks run from top to bottom, and what is committed is what they gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> set[str]:
    """What a cell shows, leaving out what differs from run to run."""
    return {kind for output in cell.outputs for kind in output.get("data", {})}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    committed = nbformat.read(path, as_version=4)
    ran = nbformat.from_dict(committed)
    client = NotebookClient(
        ran, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute()
    for before, after in zip(
        code_cells(nbformat.read(path, as_version=4)), code_cells(ran), strict=True
    ):
        assert kinds(before) == kinds(after), f"execute {path.name} and commit it: {after.source}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_clean_and_small(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert outputs
    assert {output.output_type for output in outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert path.stat().st_size < 300_000


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 2
