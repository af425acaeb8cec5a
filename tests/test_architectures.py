"""A sample of the awkward architectures: equal to the bit over two steps, inside the budget."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.architectures import sweep

# Experts whose logits a hook collects, masks that numpy draws and layers that are left out before
# a CTC loss, slices written in place, states kept in attributes, pooling, patches that are hidden.
SAMPLE = {
    "qwen2_moe": "graph",
    "wavlm_ctc": "modules",
    "longformer": "graph",
    "recurrent_gemma": "graph",
    "funnel": "graph",
    "vit_mae": "graph",
}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["model"]: row for row in sweep(list(SAMPLE), emit="auto")}


@pytest.mark.parametrize("name", sorted(SAMPLE))
def test_two_steps_are_equal_to_the_bit_and_inside_the_budget(
    name: str, rows: dict[str, dict[str, Any]]
) -> None:
    row = rows[name]
    assert row["regions"] == SAMPLE[name], row
    assert row["ops again"] > 0
    assert 0 < row["peak MB"] <= row["budget MB"]
