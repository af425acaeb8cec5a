"""Plans over modules, by the names of the calls that are regions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from solvers.plan import Plan, Region
from solvers.problem import Problem, Span


def translated(plan: Plan, problem: Problem) -> Plan:
    """Give the plan that makes regions of the same calls of modules, as far as there are such."""
    regions = plan_of(region_names(plan), problem).regions
    return replace(plan, regions=regions, signature=problem.signature)


def region_names(plan: Plan) -> frozenset[str]:
    """Name the calls that are regions."""
    return frozenset(region.module for region in plan.walk())


def plan_of(names: Collection[str], problem: Problem) -> Plan:
    """Give the plan that makes regions of named calls, as far as there are such."""
    spans = [span for span in problem.spans or () if span.name in names]
    return Plan(regions=_nested(spans), solver="auto", signature=problem.signature)


def _nested(inside: list[Span]) -> tuple[Region, ...]:
    made: list[Region] = []
    while inside:
        span, *rest = inside
        within = [other for other in rest if other.stop <= span.stop]
        inside = rest[len(within) :]
        made.append(
            Region(start=span.start, stop=span.stop, children=_nested(within), module=span.name)
        )
    return tuple(made)


def listing(plan: Plan) -> str:
    """Write a plan of module calls for people."""
    lines = ["# The model's own forward runs, and these modules in torch.utils.checkpoint:"]

    def write(regions: tuple[Region, ...], depth: int) -> None:
        for region in regions:
            path, _, number = region.module.partition(":")
            which = f"  # call {number}" if number else ""
            lines.append(f"{'    ' * depth}{path}{which}")
            write(region.children, depth + 1)

    write(plan.regions, 0)
    return "\n".join(lines) + "\n"
