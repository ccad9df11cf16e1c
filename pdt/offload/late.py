"""Updates that the host computes while the device goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
TIMEOUT_S = 600.0  # for a job


class Late(Generic[Result]):
    """Jobs in a thread of their own, one after the other.

    `start` begins, `take` waits for the results of what was started last, in order, and raises what
    a job has raised; without any, it returns an empty list.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: list[Future[Result]] = []

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """A job whose result `take` does not wait for."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="pdt-host")
        return self._pool.submit(job)

    def start(self, jobs: Sequence[Callable[[], Result]]) -> None:
        """RuntimeError while the results of other jobs have not been taken."""
        if self._running:
            raise RuntimeError("the jobs before are not taken yet")
        self._running = [self.submit(job) for job in jobs]

    def take(self) -> list[Result]:
        running, self._running = self._running, []
        return [job.result(TIMEOUT_S) for job in running]
