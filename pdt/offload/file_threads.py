"""Threads that read and write files while others compute: in order per file, side by side between.

A disk may be emulated, for one that is slow shows what waiting costs, and a file that was just
written comes from memory: a transfer is over when a disk of the given latency and bandwidth would
have done it. Waiting uses no core.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable

from pdt.comm.topology import Link
from pdt.offload.bus import Transfer

READ, WRITE, DELETE = "read", "write", "delete"
_TIMEOUT_S = 300.0  # for all that is under way


class FileTransfer(Transfer):
    """One read, write or deletion under way, as a transfer of the bus; `name` is the tensor's.

    Its tensor is held, and must not be touched, until `is_completed()`. After an error, what was to
    be read is worth nothing.
    """

    def __init__(self, work: Callable[[], None], nbytes: int, direction: str, name: str) -> None:
        super().__init__((), direction, name)
        self.nbytes = nbytes
        self._was_told = False  # of the error, to whoever asked
        self._work: Callable[[], None] | None = work
        self._after: list[Callable[[FileTransfer], None]] = []
        self._lock = threading.Lock()

    @property
    def fails_untold(self) -> bool:
        """Whether it went wrong and nobody has been told."""
        return self._error is not None and not self._was_told

    def disregard(self) -> BaseException | None:
        """Its error, which nobody else need be told of."""
        self._was_told = True
        return self._error

    def wait(self) -> None:
        try:
            super().wait()
        finally:
            self._was_told = self._done.is_set()

    def then(self, call: Callable[[FileTransfer], None]) -> None:
        """Call it with this transfer when it has ended, in the thread that did it, or now."""
        with self._lock:
            if not self._done.is_set():
                self._after.append(call)
                return
        call(self)

    def run(self) -> None:
        assert self._work is not None
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def end(self, start_s: float, end_s: float) -> None:
        self._work = None  # what it held need not live any longer
        with self._lock:
            super().end(start_s, end_s)
            calls, self._after = self._after, []
        for call in calls:
            try:
                call(self)
            except BaseException as error:  # the thread goes on; whoever waits later is told
                self._error = self._error or error


class Disk:
    """When a transfer would be over on a disk with `link`, that reads and writes at the same time.

    Each direction carries one after the other; latencies of several overlap.
    """

    def __init__(self, link: Link | None) -> None:
        self._link = link or Link(0.0, float("inf"))
        self._free_s: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def reserve(self, direction: str, nbytes: int) -> tuple[float, float]:
        """Begin and end, `perf_counter` seconds, of a transfer asked for now."""
        with self._lock:
            start_s = max(time.perf_counter(), self._free_s[direction])
            self._free_s[direction] = start_s + nbytes / self._link.bandwidth
            return start_s, self._free_s[direction] + self._link.latency_s


class FileThreads:
    """Do transfers: those of one name in the order given, as many side by side as `threads`."""

    def __init__(self, threads: int, link: Link | None) -> None:
        self._disk = Disk(link)
        self._lines: dict[str, deque[FileTransfer]] = {}  # by name, what is not over
        self._next: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._failed: list[FileTransfer] = []
        self._is_open, self._pid = True, os.getpid()
        self._threads = [
            threading.Thread(target=self._work, daemon=True, name=f"pdt-files-{i}")
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, transfer: FileTransfer) -> None:
        """Raises RuntimeError after `close`."""
        if self._is_forked:
            raise RuntimeError(
                f"{transfer.direction} {transfer.name!r}: the store is process {self._pid}'s, off "
                f"which this one, {os.getpid()}, was forked: make a store here"
            )
        with self._changed:
            if not self._is_open:
                raise RuntimeError(f"{transfer.direction} {transfer.name!r}: the store is closed")
            line = self._lines.setdefault(transfer.name, deque())
            line.append(transfer)
            if len(line) == 1:
                self._next.put(transfer.name)

    @property
    def _is_forked(self) -> bool:
        """Whether this process was forked off the one that has the threads."""
        return os.getpid() != self._pid

    def are_current(self) -> bool:
        """Whether one of them is the caller."""
        return threading.current_thread() in self._threads

    def drain(self) -> None:
        """Return when nothing is under way; raises RuntimeError when it does not end."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._lines, _TIMEOUT_S):
                names = ", ".join(map(repr, self._lines))
                raise RuntimeError(f"not over in {_TIMEOUT_S:g} s: {names}")

    def close(self) -> None:
        """End the threads, after what is under way; a forked process has none."""
        if self._is_forked:
            return
        with self._changed:
            self._is_open = False
        try:
            self.drain()
        finally:
            for _ in self._threads:
                self._next.put(None)
        for thread in self._threads:
            thread.join(_TIMEOUT_S)

    def untold(self) -> list[BaseException]:
        """The errors that nobody has been told of; they are told by this."""
        if self._is_forked:
            return []
        with self._changed:
            failed, self._failed = self._failed, []
        return [error for t in failed if t.fails_untold and (error := t.disregard())]

    def _work(self) -> None:
        while (name := self._next.get()) is not None:
            transfer = self._lines[name][0]
            start_s, end_s = self._do(transfer)
            transfer.end(start_s, end_s)
            with self._changed:
                line = self._lines[name]
                line.popleft()
                if line:
                    self._next.put(name)
                else:
                    del self._lines[name]
                self._failed = [t for t in [*self._failed, transfer] if t.fails_untold]
                self._changed.notify_all()
            del transfer  # its tensor ends with its user's

    def _do(self, transfer: FileTransfer) -> tuple[float, float]:
        start_s, end_s = self._disk.reserve(transfer.direction, transfer.nbytes)
        transfer.run()
        if (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        return start_s, max(time.perf_counter(), start_s)
