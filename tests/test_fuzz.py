"""Random modules at random budgets: equal to the bit and inside the budget, or refused."""

from __future__ import annotations

import pytest

from benchmarks.fuzz import run


@pytest.mark.parametrize("seed", range(100, 125))
def test_random_modules_train_to_the_same_bits(seed: int) -> None:
    trial = run(str(seed))
    assert trial.kind in ("graph", "modules"), trial
    assert trial.recomputed > 0
