"""What the user asked for: the arguments of ``optimize``, checked before any work is done."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, SupportsIndex

import torch

from autockpt.errors import BudgetError, CaptureError
from autockpt.profiler.cost import CostChoice, cost_model
from autockpt.units import check_budget_syntax
from solvers import SOLVERS, Solver

Loss = Callable[[Any], torch.Tensor]
Emit = Literal["auto", "graph", "modules"]

# Bytes that solvers plan below the budget, for the memory model's own error: 2 % of the
# activation budget up to 64 KiB (allocations that no graph shows: random states, bookkeeping),
# and never less than 0.5 % of it.
MARGIN_BYTES = 64 * 2**10
SMALL_MARGIN_SHARE = 50
MARGIN_SHARE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of ``optimize`` besides the model and the batch."""

    memory_budget: SupportsIndex | str
    loss: Loss | None = None
    solver: str | Solver = "auto"
    cost: CostChoice = "time"
    emit: Emit = "auto"
    reserve: int = 0
    solve_seconds: float | None = None

    def check(self) -> None:
        """Refuse what is wrong for every model.

        Raises
        ------
        BudgetError, TypeError, ValueError
        """
        check_budget_syntax(self.memory_budget)
        named = isinstance(self.solver, str) and self.solver in SOLVERS
        if not callable(self.solver) and not named:
            raise ValueError(
                f"solver={self.solver!r} is none of {', '.join(SOLVERS)}; a callable "
                f"(problem, budget_bytes) -> Plan is a solver too."
            )
        cost_model(self.cost)
        check_reserve(self.reserve)
        _check_seconds(self.solve_seconds)
        check_loss_argument(self.loss)
        if self.emit not in ("auto", "graph", "modules"):
            raise ValueError(f'emit={self.emit!r} is neither "auto" nor "graph" nor "modules".')

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle; callables that cannot be pickled become ones that say so when called."""
        fields = {name: _portable(name, getattr(self, name)) for name in self.__slots__}
        return _settings, (fields,)


def check_reserve(reserve: object) -> None:
    """Refuse what is no number of bytes to leave free."""
    if isinstance(reserve, bool) or not isinstance(reserve, int):
        raise TypeError(f"reserve={reserve!r} is not an int: write bytes.")
    if reserve < 0:
        raise BudgetError(f"reserve={reserve} is negative: it is taken off the budget.")


def check_loss_argument(loss: object) -> None:
    """Refuse a loss that cannot be called."""
    if loss is not None and not callable(loss):
        raise TypeError(
            f"loss={loss!r} cannot be called: pass a function from the model's output to a scalar."
        )


def _check_seconds(seconds: object) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"solve_seconds={seconds!r} is not a number of seconds.")
    if not seconds > 0:
        raise ValueError(f"solve_seconds={seconds!r} is not above zero.")


def _settings(fields: dict[str, Any]) -> Settings:
    return Settings(**fields)


@dataclass(frozen=True, slots=True)
class Lost:
    """Stands for a callable that could not be pickled with its model.

    Saving and loading the model works as it always did; planning again does not.
    """

    argument: str
    name: str

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse, and say what to do."""
        raise CaptureError(
            f"The model was planned with {self.argument}={self.name}, which could not be pickled "
            f"with it. Call autockpt.optimize(model, ..., {self.argument}=...) again."
        )


def _portable(argument: str, value: Any) -> Any:
    if not callable(value):
        return value
    try:
        pickle.Pickler(io.BytesIO()).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return Lost(argument, getattr(value, "__qualname__", repr(value)))
    return value


def margin_bytes(budget_bytes: int, fixed_bytes: int) -> int:
    """Give the bytes that solvers stay below a budget.

    Examples
    --------
    >>> margin_bytes(10**5, 0), margin_bytes(2**23, 0), margin_bytes(2**30, 0)
    (2000, 65536, 5368710)
    """
    activations = budget_bytes - fixed_bytes
    small = min(MARGIN_BYTES, -(-activations // SMALL_MARGIN_SHARE))
    return max(small, -(-activations // MARGIN_SHARE))


def budget_for(peak_bytes: int, fixed_bytes: int, reserve: int) -> int:
    """Give the least budget that leaves room for a peak after margin and reserve.

    Examples
    --------
    >>> budget = budget_for(10**8, 10**6, 0)
    >>> budget - margin_bytes(budget, 10**6) >= 10**8
    True
    """
    needed = peak_bytes + reserve - fixed_bytes
    small = min(_grossed_up(needed, SMALL_MARGIN_SHARE), needed + MARGIN_BYTES)
    return fixed_bytes + max(small, _grossed_up(needed, MARGIN_SHARE))


def _grossed_up(nbytes: int, share: int) -> int:
    """Give the least amount that is as much after one part in ``share`` is taken off."""
    return -(-nbytes * share // (share - 1))
