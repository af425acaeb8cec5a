"""Cost models: what running an op again is said to cost, in integer nanoseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autockpt.errors import ProfileError

CostChoice = Literal["time", "roofline"] | Callable[["OpWork"], int]

# Three days in ns. Solvers add up those of all ops, and of all that runs again, in 64 bits.
_MOST_NS = 2**48


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """The work of one op, as handed to a cost callable.

    Attributes
    ----------
    target : str
        Qualified name of the torch function.
    flops : int
    output_bytes : int
        Bytes written to its results (views write none).
    measured_ns : int
        Measured time; 0 unless ``cost="time"``.
    """

    target: str
    flops: int
    output_bytes: int
    measured_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """FLOPs over a rate, plus output bytes over a rate, plus a launch.

    Deterministic: the same on every machine, so plans, tests and tables can be compared.

    Examples
    --------
    >>> Roofline()(OpWork(target="mm", flops=50_000, output_bytes=5_000))
    7000
    """

    flops_per_second: float = 50e9
    bytes_per_second: float = 5e9
    launch_ns: int = 5_000

    def __call__(self, work: OpWork) -> int:
        """Nanoseconds of one run."""
        compute = work.flops * 1e9 / self.flops_per_second
        traffic = work.output_bytes * 1e9 / self.bytes_per_second
        return round(compute + traffic) + self.launch_ns


def measured_time(work: OpWork) -> int:
    """``cost="time"``: what was measured."""
    return work.measured_ns


def _checked(choice: Callable[[OpWork], int]) -> Callable[[OpWork], int]:
    """Believe nothing of a user's cost: solvers add it up as an exact integer."""
    name = getattr(choice, "__name__", type(choice).__name__)

    def cost(work: OpWork) -> int:
        try:
            found: object = choice(work)
        except Exception as error:
            raise ProfileError(
                f"The cost callable {name!r} raised {type(error).__name__} for {work}: {error}. "
                f"It is called as cost(work) and returns an int of ns."
            ) from error
        whole = found if isinstance(found, int) and not isinstance(found, bool) else -1
        if not 0 <= whole <= _MOST_NS:
            raise ProfileError(
                f"The cost of '{work.target}' is {found!r}: a cost callable, here {name!r}, "
                f"returns an int of at least 0 and at most 2**48, in ns."
            )
        return whole

    return cost


def cost_on(choice: CostChoice, device_type: str) -> CostChoice:
    """Give the cost that can be had on a device: on ``meta`` nothing takes any time.

    Examples
    --------
    >>> cost_on("time", "meta"), cost_on("time", "cpu")
    ('roofline', 'time')
    """
    return "roofline" if choice == "time" and device_type == "meta" else choice


def cost_name(choice: CostChoice, device_type: str) -> str:
    """Name the cost that is had on a device: ``"own"`` is a callable of the caller's."""
    found = cost_on(choice, device_type)
    return found if isinstance(found, str) else "own"


def cost_model(choice: CostChoice) -> Callable[[OpWork], int]:
    """Resolve the ``cost`` argument of ``optimize``.

    Raises
    ------
    ValueError
        For a name that is not a cost.
    """
    if choice == "time":
        return measured_time
    if choice == "roofline":
        return Roofline()
    if callable(choice):
        return _checked(choice)
    raise ValueError(
        f"cost={choice!r} is not a cost: write 'time' (measured, the default), 'roofline' "
        f"(deterministic, from FLOPs and bytes), or pass a callable from OpWork to ns."
    )
