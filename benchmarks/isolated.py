"""Runs trials in a process of their own: one that crashes or hangs is a result like others."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any


def outcomes(
    run: Callable[[str], Any], names: Sequence[str], limit_s: float, *, workers: int = 1
) -> Iterator[tuple[str, Any]]:
    """Yield ``(name, run(name))`` as they are done; a string that says how a process ended.

    Parameters
    ----------
    run : callable
        A function of a module, that its process can import.
    names : sequence of str
    limit_s : float
        Seconds for one name.
    workers : int
        Processes at a time, each with a thread.
    """
    todo = iter(names)
    pool = [_Worker(run) for _ in range(min(workers, len(names)))]
    busy = [worker for worker in pool if worker.take(next(todo, None))]
    while busy:
        multiprocessing.connection.wait([w.connection for w in busy], timeout=0.2)
        for worker in list(busy):
            found = worker.result(limit_s)
            if found is not None:
                yield worker.name, found[0]
                if not worker.take(next(todo, None)):
                    busy.remove(worker)
    for worker in pool:
        worker.stop()


class _Worker:
    """One process, started again where it has ended."""

    def __init__(self, run: Callable[[str], Any]) -> None:
        self.run = run
        self.name = ""
        self._start()

    def _start(self) -> None:
        # Threads of a worker would fight for the cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(self.run, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def take(self, name: str | None) -> bool:
        """Begin with a name; say whether there is one."""
        if name is None:
            return False
        self.name, self.since = name, time.monotonic()
        self.connection.send(name)
        return True

    def result(self, limit_s: float) -> tuple[Any] | None:
        """What came of the name, in a tuple, or None if it is still being worked on."""
        try:
            if self.connection.poll():
                return (self.connection.recv(),)
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            self._start()
            return (f"the process ended with {code}",)
        if time.monotonic() - self.since > limit_s:
            self.stop()
            self._start()
            return (f"not done after {limit_s:g} seconds",)
        return None

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()


def _serve(run: Callable[[str], Any], connection: Connection) -> None:
    while True:
        name = connection.recv()
        try:
            found = run(name)
        except Exception:  # noqa: BLE001, a fault of the trial itself is told like a crash
            found = traceback.format_exc()
        connection.send(found)
