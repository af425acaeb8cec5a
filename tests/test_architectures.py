"""Architectures that are awkward to plan for: equal to the bit, inside the budget."""

from __future__ import annotations

import pytest

from benchmarks.trial import Subject, attempt
from tests.awkward import AWKWARD

# Experts, masks drawn by numpy before a CTC loss, layers left out by a draw, slices written in
# place, patches hidden by a draw, draws of numpy that are seeded in forward.
SAMPLE = {
    "qwen2_moe": "graph",
    "vit_mae": "graph",
    "hubert_ctc": "modules",
    "opt_layerdrop": "graph",
    "longformer": "graph",
    "big_bird": "modules",
}


@pytest.mark.parametrize("name", sorted(SAMPLE))
def test_two_steps_are_equal_to_the_bit_and_inside_the_budget(name: str) -> None:
    case = AWKWARD[name]()
    subject = Subject(model=case.model, args=case.args, kwargs=case.kwargs, loss=case.loss)
    trial = attempt(name, subject, budget="60%")
    assert trial.kind == SAMPLE[name], trial
    assert trial.recomputed > 0
    assert trial.peak_bytes <= trial.budget_bytes
