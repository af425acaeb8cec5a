"""What makes a plan well-formed for a problem: order, edges, prologues, kept ops, spans."""

from __future__ import annotations

from collections.abc import Sequence

from solvers.errors import PlanError
from solvers.judge.keeping import keepable_ops, keeps_in_step
from solvers.judge.prologue import reads_inside_others, repeatable_ops, unmade_views
from solvers.plan import Plan, Region
from solvers.problem import Problem


def check_plan(plan: Plan, problem: Problem) -> None:
    """Raise PlanError unless ``plan`` is a well-formed plan for ``problem``."""
    if plan.signature and problem.signature and plan.signature != problem.signature:
        raise PlanError(
            f"The plan was made for another model: its stream of calls has the digest "
            f"{plan.signature}, this model's has {problem.signature}. Plan again."
        )
    _check_regions(plan.regions, 0, len(problem.ops), problem)
    _check_prologues(plan.regions, problem)
    _check_kept(plan.regions, problem)
    _check_spans(plan, problem)


def _check_regions(regions: tuple[Region, ...], low: int, high: int, problem: Problem) -> None:
    position = low
    for region in regions:
        _check_region(region)
        where = f"region [{region.start}, {region.stop})"
        if not position <= region.start < region.stop <= high:
            raise PlanError(
                f"{where} does not lie in [{position}, {high}): regions are disjoint, in "
                f"order, not empty, and inside their parent."
            )
        for edge in (region.start, region.stop):
            if not problem.boundaries[edge]:
                raise PlanError(
                    f"{where} has an edge before op {edge}, inside a stretch that writes a "
                    f"storage in place: move it to where Problem.boundaries is true."
                )
        pinned = [i for i in range(region.start, region.stop) if problem.ops[i].pinned]
        if pinned:
            op = problem.ops[pinned[0]]
            raise PlanError(
                f"{where} holds op {pinned[0]} ({op.target} at {op.source}), which must stay "
                f"outside all regions."
            )
        if any((c.start, c.stop) == (region.start, region.stop) for c in region.children):
            raise PlanError(f"{where} has a child of its own size.")
        _check_regions(region.children, region.start, region.stop, problem)
        position = region.stop


def _check_region(region: object) -> None:
    """Raise PlanError for what a solver of somebody else's may have put in a region's place."""
    if not isinstance(region, Region):
        raise PlanError(
            f"{region!r} is not a solvers.Region: regions are written Region(start=i, stop=j), or "
            f"all at once, Plan.flat([(i, j), ...])."
        )
    for edge in (region.start, region.stop):
        if not hasattr(edge, "__index__"):
            raise PlanError(f"{region!r} does not begin and end at whole numbers of ops.")


def _check_prologues(regions: Sequence[Region], problem: Problem) -> None:
    """Raise PlanError unless the prologues of a plan's outermost regions are well-formed."""
    if not any(inner.prologue for region in regions for inner in region.walk()):
        return
    allowed = repeatable_ops(problem)
    for region in regions:
        for inner in region.walk():
            if inner.prologue:
                _check_prologue(inner, problem, allowed, outermost=inner is region)
    for region, other in reads_inside_others(regions, problem):
        raise PlanError(
            f"The prologue of region [{region.start}, {region.stop}) reads what region "
            f"[{other.start}, {other.stop}) makes and nobody else reads: it is gone by then. Add "
            f"the op that makes it, or take the op that reads it out."
        )


def _check_prologue(
    region: Region, problem: Problem, allowed: frozenset[int], *, outermost: bool
) -> None:
    where = f"The prologue of region [{region.start}, {region.stop})"
    prologue = region.prologue
    if region.children or not outermost:
        raise PlanError(f"{where}: only a region with neither parent nor children may have one.")
    if list(prologue) != sorted(set(prologue)) or prologue[0] < 0:
        raise PlanError(f"{where}, {prologue}, is not a list of ops in program order.")
    if prologue[-1] >= region.start:
        raise PlanError(f"{where} holds op {prologue[-1]}, which is not before the region.")
    for index in prologue:
        if index not in allowed:
            op = problem.ops[index]
            raise PlanError(
                f"{where} holds op {index} ({op.target} at {op.source}), which cannot be run "
                f"again apart from its neighbours."
            )
    for index in (*prologue, *range(region.start, region.stop)):
        if unmade_views(region, problem, index):
            raise PlanError(
                f"{where} makes a storage again of which op {index} reads a view that is not "
                f"made again: add the op that takes the view."
            )


def _check_kept(regions: Sequence[Region], problem: Problem) -> None:
    """Raise PlanError unless what the regions of a plan keep is well-formed."""
    if not any(inner.kept for region in regions for inner in region.walk()):
        return
    allowed = keepable_ops(problem)
    for region in regions:
        for inner in region.walk():
            where = f"What region [{inner.start}, {inner.stop}) keeps, {inner.kept},"
            if inner.kept and (inner.children or inner is not region):
                raise PlanError(
                    f"{where} is in a region with parent or children: only one with neither may "
                    f"keep ops."
                )
            if list(inner.kept) != sorted(set(inner.kept)) or not set(inner.kept) <= set(
                range(inner.start, inner.stop)
            ):
                raise PlanError(f"{where} is not a list of its ops in program order.")
            if not keeps_in_step(inner, problem):
                raise PlanError(
                    f"{where} has some of its ops that draw random numbers and not all: name all "
                    f"of them, or none."
                )
            wrong = [index for index in inner.kept if index not in allowed]
            if wrong:
                op = problem.ops[wrong[0]]
                raise PlanError(
                    f"{where} holds op {wrong[0]} ({op.target} at {op.source}), which cannot be "
                    f"kept apart from its neighbours."
                )


def _check_spans(plan: Plan, problem: Problem) -> None:
    if problem.spans is None:
        return
    allowed = {(span.start, span.stop, span.name) for span in problem.spans}
    for region in plan.walk():
        if (region.start, region.stop, region.module) not in allowed:
            named = f" of {region.module!r}" if region.module else ""
            raise PlanError(
                f"region [{region.start}, {region.stop}){named} is no call of a module that may "
                f"run again: with emit='modules' a region is one of Problem.spans."
            )
