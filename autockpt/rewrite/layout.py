"""Long calls on several lines."""

from __future__ import annotations

from collections.abc import Iterator

WIDTH = 100


def laid_out(statement: str, indent: str, comment: str = "") -> list[str]:
    """Break a statement that ends in a call where it would be too long for a line.

    Examples
    --------
    >>> laid_out("y = f(x)", "    ", "  # a.py:1")
    ['    y = f(x)  # a.py:1']
    >>> for line in laid_out(f"y = f({'x' * 60}, g(a, 'b, c'), {'z' * 30})", ""):
    ...     print(line)
    y = f(
        xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx, g(a, 'b, c'),
        zzzzzzzzzzzzzzzzzzzzzzzzzzzzzz,
    )
    """
    whole = f"{indent}{statement}{comment}"
    if len(whole) <= WIDTH or not statement.endswith(")"):
        return [whole]
    opening = _opening(statement)
    lines = [f"{indent}{statement[: opening + 1]}{comment}"]
    line = ""
    for argument in _arguments(statement[opening + 1 : -1]):
        longer = f"{line} {argument}," if line else f"{indent}    {argument},"
        if line and len(longer) > WIDTH:
            lines.append(line)
            longer = f"{indent}    {argument},"
        line = longer
    return [*lines, line, f"{indent})"] if line else [whole]


def _depths(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield position, character and depth of brackets, strings left out."""
    depth, quote, escaped = 0, "", False
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = character == "\\" and not escaped
            continue
        if character in "'\"":
            quote = character
        depth += character in "([{"
        yield position, character, depth
        depth -= character in ")]}"


def _opening(statement: str) -> int:
    """Find the bracket that the last character of a statement closes."""
    return max(p for p, character, depth in _depths(statement) if character == "(" and depth == 1)


def _arguments(text: str) -> list[str]:
    cuts = [p for p, character, depth in _depths(text) if character == "," and depth == 0]
    starts, stops = [0, *(cut + 1 for cut in cuts)], [*cuts, len(text)]
    parts = (text[start:stop].strip() for start, stop in zip(starts, stops, strict=True))
    return [part for part in parts if part]
