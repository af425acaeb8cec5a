"""A fixed tenth of the grid that ``benchmarks/judge.py`` runs: both precisions, both solvers."""

from __future__ import annotations

import pytest

from benchmarks.judge import cells
from tests.zoo import ZOO

# Model, precision, budget, solver. Where hand placement has no plan for a budget, `auto` has.
TENTH = (
    ("bert", "bf16", "40%", "auto"),
    ("bert", "fp32", "60%", "sqrt_n"),
    ("convnext", "bf16", "least", "auto"),
    ("convnext", "fp32", "40%", "auto"),
    ("gpt2", "bf16", "50%", "auto"),
    ("gpt2", "fp32", "plain", "none"),
    ("llama", "bf16", "least", "auto"),
    ("llama", "fp32", "60%", "auto"),
    ("resnet", "bf16", "60%", "auto"),
    ("resnet", "fp32", "80%", "auto"),
    ("swin", "bf16", "plain", "none"),
    ("swin", "fp32", "40%", "auto"),
    ("t5", "bf16", "30%", "auto"),
    ("unet", "bf16", "50%", "auto"),
    ("unet", "fp32", "60%", "auto"),
    ("vit", "bf16", "50%", "auto"),
    ("vit", "fp32", "least", "auto"),
    ("whisper", "bf16", "40%", "auto"),
    ("whisper", "fp32", "60%", "sqrt_n"),
)
# Of the measured activation peak, in %. The worst of the whole grid is 0.2.
TOLERANCE = 0.5


@pytest.mark.parametrize(("name", "precision", "budget", "solver"), TENTH)
def test_a_cell_is_predicted_and_inside_its_budget(
    name: str, precision: str, budget: str, solver: str
) -> None:
    found = list(cells({}, ZOO[name](), budget, solver, bf16=precision == "bf16"))
    assert [row["gradients"] for row in found] == ["resident", "fresh"]
    for row in found:
        assert abs(row["error %"]) <= TOLERANCE
        assert not row["over budget"]
