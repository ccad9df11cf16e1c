"""Updates that the host computes while the device goes on with the parameters it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Result = TypeVar("Result")
_TIMEOUT_S = 600.0


class Late(Generic[Result]):
    """One list of jobs at a time, in a thread of its own.

    `start` begins, `take` waits for the results of what was started last, in order, and raises what
    a job has raised; without any, it returns an empty list.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[list[Result]] | None = None

    def start(self, jobs: Sequence[Callable[[], Result]]) -> None:
        if self._running is not None:
            raise RuntimeError("the jobs before are not taken yet")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="pdt-host")
        self._running = self._pool.submit(lambda: [job() for job in jobs])

    def take(self) -> list[Result]:
        running, self._running = self._running, None
        return [] if running is None else running.result(_TIMEOUT_S)
