"""A line that says what planning is doing, once it takes longer than a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console

PATIENCE_SECONDS = 1.0


@contextmanager
def progress(console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Yield a function that is told what is being tried.

    Silent for the first second, and where stderr is no terminal.

    Examples
    --------
    >>> with progress() as say:
    ...     say("every flat plan")
    """
    console = console or Console(stderr=True)
    started = time.monotonic()
    with ExitStack() as stack:
        status = console.status("autockpt plans")
        shown = False

        def say(line: str) -> None:
            nonlocal shown
            if not console.is_terminal or time.monotonic() - started < PATIENCE_SECONDS:
                return
            status.update(f"autockpt plans: {line}")
            if not shown:
                shown = True
                stack.enter_context(status)

        yield say
