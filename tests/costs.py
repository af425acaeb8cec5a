"""What ops are said to cost in tests: the same on every machine."""

from __future__ import annotations

from autockpt.profiler.cost import OpWork, Roofline

_ROOFLINE = Roofline()


def dear_draws(work: OpWork) -> int:
    """Cost what the roofline says, and draws what a CPU takes for them.

    Like measured times it makes plans keep masks.

    Examples
    --------
    >>> work = OpWork(target="torch.dropout.draw", flops=0, output_bytes=1000)
    >>> dear_draws(work) - Roofline()(work)
    4000
    """
    return _ROOFLINE(work) + (4 * work.output_bytes if work.target.endswith(".draw") else 0)
