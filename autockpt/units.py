"""Bytes as people write and read them, and the memory budget."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import SupportsIndex

from autockpt.errors import BudgetError

_FACTORS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_AMOUNT = re.compile(r"\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*([A-Za-z]+|%)?\s*", re.ASCII)
_FORMS = 'Write bytes as an int or as "6GiB", or a share of the plain activation peak as "50%".'


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A memory budget, resolved for one model and batch.

    Attributes
    ----------
    peak_bytes : int
        What the peak of a step, fixed bytes included, must not exceed.
    text : str
        The budget as it was asked for.
    """

    peak_bytes: int
    text: str

    def __str__(self) -> str:
        asked = f" ({self.text})" if self.text.endswith("%") else ""
        return format_bytes(self.peak_bytes) + asked


def check_budget_syntax(budget: SupportsIndex | str) -> None:
    """Refuse a budget that is wrong for every model, before any work is done.

    Raises
    ------
    TypeError
        It is neither an integer nor a string. A bare float could mean bytes or a share.
    BudgetError
        It cannot be read, is not above zero, or is a share above 100 %.

    Examples
    --------
    >>> check_budget_syntax("512 MiB")
    >>> check_budget_syntax(0.5)
    Traceback (most recent call last):
    TypeError: memory_budget=0.5 could be bytes or a share. Write bytes as an int or as "6GiB",
        or a share of the plain activation peak as "50%".
    """
    _read(budget)


def parse_budget(
    budget: SupportsIndex | str,
    fixed_bytes: int,
    plain_activation_peak_bytes: int,
    *,
    parts: Mapping[str, int] | None = None,
) -> Budget:
    """Resolve a budget to the bytes that the peak must not exceed.

    Parameters
    ----------
    budget : int or str
        Bytes (``6 * 2**30``, ``"6GiB"``, ``"6 GB"``), or a share of the plain step's activation
        peak on top of the fixed bytes (``"50%"``).
    fixed_bytes : int
        Bytes there at the start of a step with gradients resident.
    plain_activation_peak_bytes : int
        Peak of the plain step less the fixed bytes.
    parts : mapping of str to int, optional
        What the fixed bytes consist of, for the message: ``{"parameters": 1024, ...}``.

    Returns
    -------
    Budget

    Raises
    ------
    TypeError, BudgetError
        As ``check_budget_syntax``, and BudgetError for less than the fixed bytes.

    Examples
    --------
    >>> parse_budget("50%", fixed_bytes=1000, plain_activation_peak_bytes=600).peak_bytes
    1300
    >>> parse_budget("1.5KiB", fixed_bytes=1000, plain_activation_peak_bytes=600).peak_bytes
    1536
    """
    amount, is_share = _read(budget)
    text = str(budget).strip()
    if is_share:
        share_bytes = math.floor(amount * plain_activation_peak_bytes)
        return Budget(peak_bytes=fixed_bytes + share_bytes, text=text)
    peak_bytes = math.floor(amount)
    if peak_bytes < fixed_bytes:
        listing = _listing(parts) if parts else "parameters, buffers, gradients and the batch"
        raise BudgetError(
            f"memory_budget={budget!r} is {format_bytes(peak_bytes)}, less than the "
            f"{format_bytes(fixed_bytes, round_up=True)} that are there before a step starts "
            f"({listing}): no checkpoints can change those. The plain step needs another "
            f"{format_bytes(plain_activation_peak_bytes)} for activations. Raise the budget, or "
            f'give a share of the activations such as "50%".'
        )
    return Budget(peak_bytes=peak_bytes, text=text)


def format_bytes(nbytes: int, *, round_up: bool = False) -> str:
    """Write bytes for people, in binary units with two decimals.

    Parameters
    ----------
    nbytes : int
    round_up : bool
        Never write less than there is: for an amount that the reader is told to ask for.

    Examples
    --------
    >>> format_bytes(3 * 2**29), format_bytes(512), format_bytes(-1536)
    ('1.50 GiB', '512 B', '-1.50 KiB')
    >>> format_bytes(2**20 + 1), format_bytes(2**20 + 1, round_up=True)
    ('1.00 MiB', '1.01 MiB')
    """
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    hundredths = 0
    for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1):
        scaled = Fraction(nbytes * 100, 1024**power)
        hundredths = math.ceil(scaled) if round_up else round(scaled)
        if abs(hundredths) < 1024 * 100 or unit == "TiB":
            break
    sign = "-" if hundredths < 0 else ""
    whole, decimals = divmod(abs(hundredths), 100)
    return f"{sign}{whole}.{decimals:02d} {unit}"


def _read(budget: SupportsIndex | str) -> tuple[Fraction, bool]:
    """Return an amount in bytes, or a share in (0, 1] and True."""
    if isinstance(budget, str):
        return _read_text(budget)
    if isinstance(budget, float):
        raise TypeError(f"memory_budget={budget!r} could be bytes or a share. {_FORMS}")
    if isinstance(budget, bool) or not hasattr(budget, "__index__"):
        raise TypeError(f"memory_budget={budget!r} is a {type(budget).__name__}. {_FORMS}")
    nbytes = operator.index(budget)
    _require_positive(budget, nbytes)
    return Fraction(nbytes), False


def _read_text(budget: str) -> tuple[Fraction, bool]:
    match = _AMOUNT.fullmatch(budget)
    if match is None:
        raise BudgetError(f"memory_budget={budget!r} cannot be read. {_FORMS}")
    number, unit = Fraction(match[1]), (match[2] or "").lower()
    _require_positive(budget, number)
    if unit == "%":
        if number > 100:
            raise BudgetError(
                f"memory_budget={budget!r} is more than the plain step needs: a share is above "
                f'0% and at most "100%", which is the plain activation peak.'
            )
        return number / 100, True
    if not unit:
        raise BudgetError(f"memory_budget={budget!r} has no unit. {_FORMS}")
    if unit not in _FACTORS:
        raise BudgetError(
            f"memory_budget={budget!r} has the unit {match[2]!r}; the units are %, B, kB, MB, "
            f"GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024)."
        )
    amount = number * _FACTORS[unit]
    if amount < 1:
        raise BudgetError(f"memory_budget={budget!r} is less than one byte. {_FORMS}")
    return amount, False


def _require_positive(budget: SupportsIndex | str, number: Fraction | int) -> None:
    if number <= 0:
        raise BudgetError(f"memory_budget={budget!r} is not above zero. {_FORMS}")


def _listing(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes)
