"""The backends of linear and integer programs: HiGHS if installed, else PuLP's CBC."""

from __future__ import annotations

import ctypes
import math
import os
from functools import cache

import pulp


def run_program(
    model: pulp.LpProblem, *, seconds: float | None = None, exact: bool = False
) -> None:
    """Solve a program in place, on one thread, for the same answer every time.

    Parameters
    ----------
    seconds : float, optional
        Limit; the answer at a limit depends on the machine.
    exact : bool
        Leave no gap between an integer solution and its bound.
    """
    options: dict[str, float] = {}
    if seconds is not None:
        options["timeLimit"] = seconds
    if exact:
        options["gapRel"] = 0.0
    if _has_highs():
        try:
            model.solve(pulp.HiGHS(msg=False, threads=1, **options))
            return
        except IndexError:
            # PuLP reads a solution even where presolve has found that there is none.
            pass
    # The CBC that comes with PuLP; its own class for it is about to go.
    path = pulp.PULP_CBC_CMD.pulp_cbc_path
    model.solve(pulp.COIN_CMD(path=path, msg=False, threads=1, **options))


def proven_bound(model: pulp.LpProblem) -> float | None:
    """Return what a program's solution was proven not to go below when its limit was hit.

    None where the backend does not say: CBC does not, nor HiGHS before it has a bound.
    """
    if not isinstance(model.solver, pulp.HiGHS):
        return None
    found = float(model.solverModel.getInfo().mip_dual_bound)
    return found if math.isfinite(found) else None


@cache
def _has_highs() -> bool:
    """Tell whether HiGHS is installed; its first object prints a banner, let nobody see it."""
    if not pulp.HiGHS(msg=False).available():
        return False
    if os.name == "posix":
        _make_quietly()
    return True


def _make_quietly() -> None:
    import highspy

    libc = ctypes.CDLL(None)
    libc.fflush(None)
    try:
        stdout = os.dup(1)
    except OSError:
        # Without a standard output there is nothing to hide the banner from.
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()
        libc.fflush(None)
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)
