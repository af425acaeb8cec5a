"""Batches, lengths and masks other than the planned ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autockpt
from tests import zoo
from tests.helpers import activation_peak_bytes, assert_same_bits, run_case


def variants(given: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Keyword arguments of other calls, by what they are."""
    rows, length = given["input_ids"].shape
    bare = {name: value for name, value in given.items() if name != "attention_mask"}
    ones = torch.ones_like(given["input_ids"])
    padded, left = ones.clone(), ones.clone()
    padded[0, length // 2 :] = 0
    left[0, : length // 2] = 0
    return {
        "fewer rows": {name: value[: rows - 1] for name, value in given.items()},
        "shorter": {
            name: value[:, : length // 2 - 3].contiguous() for name, value in given.items()
        },
        "no mask": bare,
        "no padding": {**bare, "attention_mask": ones},
        "padding": {**bare, "attention_mask": padded},
        "no padding again": {**bare, "attention_mask": ones.clone()},
        "padding on the left": {**bare, "attention_mask": left},
        "more rows": {name: torch.cat([value, value[:1]]) for name, value in given.items()},
    }


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_other_shapes_and_masks(name: str) -> None:
    case = zoo.ZOO[name]()
    model: Any = autockpt.optimize(
        case.model,
        case.args,
        case.kwargs,
        memory_budget="50%",
        loss=case.loss,
        cost="roofline",
        solver="interval_dp",
    )
    for what, kwargs in variants(case.kwargs).items():
        other = case._replace(kwargs=kwargs)
        assert_same_bits(run_case(other), run_case(other, model))
        budget_bytes, problem = model.autockpt.report.budget_bytes, model.autockpt.problem
        peak_bytes = activation_peak_bytes(model, other.args, other.kwargs, other.loss)
        assert peak_bytes <= budget_bytes - problem.fixed_bytes, what
