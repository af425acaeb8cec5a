"""Where segments may start and stop in a problem of thousands of ops.

Long models repeat a block. Which edges pay inside it is found out once, in a few copies in a
row, and taken over for all the others.
"""

from __future__ import annotations

from collections.abc import Iterator

from solvers.bounds import peak_bound
from solvers.judge.replay import Replay
from solvers.problem import Problem
from solvers.search.blocks import numbered
from solvers.search.interval_search import IntervalSearch, all_positions
from solvers.search.intervals import Intervals

_COPIES = 3
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_LIMITS = (0.02, 0.05, 0.1, 0.2, 1.0)
_LABELS = 256

Run = tuple[int, int]


def positions_of(replay: Replay, tables: Intervals, most_ops: int) -> tuple[int, ...]:
    """Return the positions to search over, rising: all of them up to ``most_ops`` ops.

    Notes
    -----
    One search over three copies of every distinct block, and then of the whole over so many
    fewer positions: near linear in the number of ops.
    """
    problem = replay.problem
    size = len(problem.ops)
    if size <= most_ops:
        return all_positions(size)
    kinds: dict[tuple[object, ...], list[Run]] = {}
    for run in numbered(problem, tables.reach):
        kinds.setdefault(_fingerprint(problem, run), []).append(run)
    positions = set(range(size + 1))
    for runs in kinds.values():
        stretch = _stretch(runs, tables.reach)
        offsets = set(_paying_offsets(replay, tables, stretch))
        for start, stop in runs:
            positions.difference_update(range(start + 1, stop))
            positions.update(start + offset for offset in offsets)
    return tuple(sorted(positions))


def _fingerprint(problem: Problem, run: Run) -> tuple[object, ...]:
    """Return what tells blocks apart: two with the same have the same edges."""
    start, stop = run
    made = [0] * (stop - start)
    for storage in problem.storages:
        if storage.producer is not None and start <= storage.producer < stop:
            made[storage.producer - start] += storage.nbytes
    return tuple(
        (op.target, op.cost, op.packs, len(op.saved), nbytes)
        for op, nbytes in zip(problem.ops[start:stop], made, strict=True)
    )


def _stretch(runs: list[Run], reach: int) -> list[Run]:
    """Return a few neighbours among equal blocks, from the middle of the model."""
    middle = len(runs) // 2
    stretch = [runs[middle]]
    for run in runs[middle + 1 :]:
        longer = run[1] - stretch[0][0]
        if run[0] != stretch[-1][1] or longer > reach or len(stretch) == _COPIES:
            break
        stretch.append(run)
    return stretch


def _paying_offsets(replay: Replay, tables: Intervals, stretch: list[Run]) -> Iterator[int]:
    low, high = stretch[0][0], min(stretch[-1][1], stretch[0][0] + tables.reach)
    plain = int(tables.plain_keeps[low, high - low])
    search = IntervalSearch(replay, tables, tuple(range(low, high + 1)))
    labels = search.search(
        _limits(replay),
        {},
        low,
        high,
        labels=_LABELS,
        span_bytes=plain,
        price=search.average_price(),
    )
    edges = {low}
    for budget, number in enumerate(labels.count[high - low]):
        kept = labels.kept[high - low, budget, :number]
        wanted = {int(kept.searchsorted(share * plain, "right")) - 1 for share in _SHARES}
        for label in sorted(wanted - {-1}):
            regions = search.regions(labels, high, budget=budget, label=label) or ()
            edges.update(edge for region in regions for edge in (region.start, region.stop))
    for start, stop in stretch:
        yield from (edge - start for edge in edges if start <= edge < stop)


def _limits(replay: Replay) -> list[int]:
    """Return peaks that leave more or less room for what a few blocks bring back at once."""
    least, plain = peak_bound(replay.problem), replay.price(())[0]
    return [least + int(share * (plain - least)) for share in _LIMITS]
