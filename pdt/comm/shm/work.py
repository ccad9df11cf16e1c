"""The handle of one call of a shared-memory group, as torch.distributed wants it."""

import threading
from collections.abc import Callable, Generator, Hashable
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

Steps = Generator[list[int], None, None]


class ShmWork(Work):
    """One call under way; complete once its results are in `tensors`, or `error` says why not.

    `steps` is a generator that moves the call as far as it goes and yields the peers it waits for.
    `text` names the call; calls of one `lane` run in order; `drive(work, timeout_s)` ends it.
    """

    def __init__(
        self,
        steps: Steps,
        text: str,
        tensors: list[torch.Tensor],
        lane: Hashable,
        drive: Callable[["ShmWork", float], None],
    ) -> None:
        super().__init__()
        self.steps, self.text, self.tensors, self.lane = steps, text, tensors, lane
        self.done, self.deadline = False, 0.0
        self.error: BaseException | None = None
        self.awaits: list[int] = []
        self._drive, self._lock = drive, threading.Lock()
        self._future: Future | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the call has ended; raises what went wrong."""
        if not self.done:
            self._drive(self, timeout.total_seconds() if timeout else 0.0)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> list[torch.Tensor]:
        return self.tensors

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """The rank that a message came from; -1 if this is no receive."""
        return getattr(self.lane, "source", -1)

    _source_rank = source_rank

    def get_future(self) -> Future:
        with self._lock:
            if self._future is None:
                self._future = Future()
                if self.done:
                    self._fill(self._future)
            return self._future

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the call as ended; `settle` must follow, once no lock is held."""
        self.error, self.done = error, True

    def settle(self) -> None:
        """Complete the future, which runs its callbacks; they may make new calls."""
        with self._lock:
            future = self._future
        if future is not None and not future.done():
            self._fill(future)

    def _fill(self, future: Future) -> None:
        if self.error is None:
            future.set_result(self.tensors)
        else:
            future.set_exception(self.error)
