"""Which calls of modules are regions where a compiler traces the model's own Python."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace

from autockpt.capture import Capture
from autockpt.errors import FallbackWarning
from autockpt.modules.spans import compiled_spans
from autockpt.reports.layers import layer_pattern
from solvers import InfeasibleError
from solvers.modules import least_peak, solve
from solvers.plan import Plan
from solvers.problem import Problem, Span


@dataclass(slots=True, eq=False)
class Compiled:
    """The plan of a step whose emitted forward a compiler does not take whole.

    Attributes
    ----------
    capture : Capture
    problem : Problem
        Of the recorded step.
    plan : Plan
        Of the recorded step: what it runs again, and the budget it was made for.
    breaks : bool
        Whether the model's own Python turned out to be no single graph either.
    probing : bool
        Whether that is being found out, without regions.
    """

    capture: Capture
    problem: Problem
    plan: Plan
    breaks: bool = False
    probing: bool = False
    _excluded: dict[str, str] = field(default_factory=dict)
    _regions: frozenset[str] | None = None

    def regions(self) -> frozenset[str]:
        """Give the calls that are regions, named as in ``Span.name``.

        Notes
        -----
        The budget is the one that the recorded step was planned for. Where no set of calls
        meets it, the set of least peak is taken. Regions do not nest: a compiler would bring
        back an inner one together with its outer one. Solved once, when first asked for.
        """
        if self.probing:
            return frozenset()
        if self._regions is None:
            self._regions = frozenset(region.module for region in self._solved().regions)
        return self._regions

    def exclude(self, path: str, reason: str) -> None:
        """Take the calls of a module, and of those like it, off those that may run again."""
        self._excluded[layer_pattern(path)] = reason
        self._regions = None
        self.probing = True

    def probed(self) -> None:
        """Take note that the whole forward is one graph without what was excluded."""
        self.probing = False
        path, reason = list(self._excluded.items())[-1]
        warnings.warn(
            f"Under torch.compile {path} does not run again, as a checkpoint of the compiler does "
            f"not take its call: {reason}.",
            FallbackWarning,
            stacklevel=2,
        )

    def _solved(self) -> Plan:
        budget_bytes = self.plan.budget_bytes
        if not self.plan.regions or budget_bytes is None:
            return Plan()
        problem = self.problem
        if problem.spans is None:
            problem = compiled_spans(problem, self.capture)
        spans = problem.spans or ()
        left = (span for span in spans if layer_pattern(_path(span)) not in self._excluded)
        problem = replace(problem, spans=tuple(left))
        try:
            return solve(problem, budget_bytes, nested=False)
        except InfeasibleError:
            return least_peak(problem, nested=False)


def _path(span: Span) -> str:
    return span.name.partition(":")[0]
