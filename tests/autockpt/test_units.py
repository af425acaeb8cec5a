"""The memory budget as users write it, and bytes as they are printed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.errors import BudgetError
from autockpt.units import Budget, check_budget_syntax, format_bytes, parse_budget

FIXED = 1_000
PLAIN = 6_001


def resolve(budget: object, fixed: int = FIXED) -> int:
    return parse_budget(budget, fixed, PLAIN).peak_bytes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        (5_000, 5_000),
        (np.int64(5_000), 5_000),
        ("6GiB", 6 * 2**30),
        ("6GB", 6 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        (" 0.1 MB ", 100_000),
        ("2TiB", 2**41),
        ("7kb", 7_000),
        ("2048B", 2_048),
        ("100%", FIXED + PLAIN),
        ("50%", FIXED + PLAIN // 2),
        ("33.3 %", FIXED + 1_998),
        (FIXED, FIXED),
    ],
)
def test_reads(budget: object, nbytes: int) -> None:
    assert resolve(budget) == nbytes


@pytest.mark.parametrize(
    ("budget", "word"),
    [
        (0, "not above zero"),
        (-5, "not above zero"),
        ("0%", "not above zero"),
        ("-3GiB", "not above zero"),
        ("-10%", "not above zero"),
        ("150%", "more than the plain step"),
        ("100.001%", "more than the plain step"),
        ("lots", "cannot be read"),
        ("", "cannot be read"),
        ("1,5GiB", "cannot be read"),
        ("nan%", "cannot be read"),
        ("1e9", "cannot be read"),
        ("٣GiB", "cannot be read"),
        ("0.5", "no unit"),
        ("6G", "unit 'G'"),
        ("6 apples", "unit 'apples'"),
        ("0.5B", "less than one byte"),
    ],
)
def test_refuses_before_any_work(budget: object, word: str) -> None:
    with pytest.raises(BudgetError, match=word) as caught:
        check_budget_syntax(budget)  # type: ignore[arg-type]
    assert repr(budget) in str(caught.value)


@pytest.mark.parametrize("budget", [0.5, 6e9, float("nan"), np.float64(0.5)])
def test_a_bare_float_is_a_type_error_that_names_both_forms(budget: float) -> None:
    with pytest.raises(TypeError, match="bytes or a share") as caught:
        check_budget_syntax(budget)  # type: ignore[arg-type]
    assert '"6GiB"' in str(caught.value)
    assert '"50%"' in str(caught.value)


@pytest.mark.parametrize("budget", [None, True, [1], np.float32(0.5), object()])
def test_other_types_are_type_errors(budget: object) -> None:
    with pytest.raises(TypeError, match="memory_budget="):
        check_budget_syntax(budget)  # type: ignore[arg-type]


def test_below_the_fixed_bytes_says_what_they_are() -> None:
    parts = {"parameters": 2**20, "gradients": 2**20, "buffers": 0, "batch": 2**10}
    fixed = sum(parts.values())
    with pytest.raises(BudgetError) as caught:
        parse_budget("1MiB", fixed, 2**30, parts=parts)
    message = str(caught.value)
    assert "'1MiB'" in message
    assert "parameters 1.00 MiB, gradients 1.00 MiB, batch 1.00 KiB" in message
    assert "buffers" not in message
    with pytest.raises(BudgetError, match="parameters, buffers, gradients and the batch"):
        parse_budget(1, fixed, 2**30)


def test_a_budget_prints_what_was_asked() -> None:
    assert str(Budget(peak_bytes=2**30, text="50%")) == "1.00 GiB (50%)"
    assert str(Budget(peak_bytes=2**30, text="1GiB")) == "1.00 GiB"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1_023, "1023 B"),
        (1_024, "1.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (5_000 * 2**40, "5000.00 TiB"),
        (-3 * 2**29, "-1.50 GiB"),
    ],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(min_value=1, max_value=2**60))
def test_what_we_tell_people_to_ask_for_is_enough(nbytes: int) -> None:
    told = format_bytes(nbytes, round_up=True)
    asked = parse_budget(told, 0, 0).peak_bytes
    assert asked >= nbytes
    assert asked <= nbytes * 1.01 + 1


@given(st.integers(min_value=1, max_value=2**60), st.integers(min_value=1, max_value=100))
def test_a_share_never_gives_more_than_it_says(plain: int, percent: int) -> None:
    peak = parse_budget(f"{percent}%", 7, plain).peak_bytes
    assert (peak - 7) * 100 <= plain * percent
    assert (peak - 6) * 100 > plain * percent
