"""Names of many layers written as one: ``h.{0-3,7}.mlp``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

# A part of a dotted path that counts: ``3``, or ``3-4`` for a region over several layers.
_INDEX = re.compile(r"(?<![^.])\d+(?:-\d+)?(?![^.])")


def layer_pattern(module: str) -> str:
    """Give the path with every index left open: equal for layers that repeat.

    Examples
    --------
    >>> layer_pattern("h.3.mlp")
    'h.*.mlp'
    """
    return _INDEX.sub("*", module)


def name_together(modules: Sequence[str]) -> str:
    """Name modules of one pattern together.

    Examples
    --------
    >>> name_together(["h.0.mlp", "h.1.mlp", "h.3.mlp"])
    'h.{0-1,3}.mlp'
    >>> name_together(["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"])
    'a.{0-1}.b.{0-1}'
    >>> name_together(["a.0.b.1", "a.1.b.2"])
    'a.0.b.1 .. a.1.b.2'
    """
    modules = list(dict.fromkeys(modules))
    columns = list(zip(*(_INDEX.findall(module) for module in modules), strict=True))
    choices = [list(dict.fromkeys(column)) for column in columns]
    moving = [choice for choice in choices if len(choice) > 1]
    if len(modules) != math.prod(map(len, choices)) or not all(
        index.isdigit() for choice in moving for index in choice
    ):
        return f"{modules[0]} .. {modules[-1]}"
    texts = iter(choices)

    def spell(_: re.Match[str]) -> str:
        choice = next(texts)
        return f"{{{_spans(map(int, choice))}}}" if len(choice) > 1 else choice[0]

    return _INDEX.sub(spell, modules[0])


def _spans(numbers: Iterable[int]) -> str:
    """Write ``0, 1, 2, 5`` as ``0-2,5``."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def file_and_line(source: str) -> str:
    """Give ``file.py:12`` of a source with its whole path.

    Examples
    --------
    >>> file_and_line("/lib/transformers/modeling_gpt2.py:251")
    'modeling_gpt2.py:251'
    """
    return source.replace("\\", "/").rsplit("/", 1)[-1]
