"""A few buffers between files and whoever uses them: read ahead of him, written behind him.

    planned -> being read -> read -> used -> being written -> free, and read into again

Whenever a buffer becomes free, in whatever thread, the next planned item is read into it. So the
disk never waits for the user, and no buffer is read into before what it held has been written. Nor
is an item read that is still to be used, and written, before: the plan goes on after that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pdt.offload.aligned import aligned_empty
from pdt.offload.file_threads import FileTransfer
from pdt.offload.files import TensorFiles
from pdt.offload.items import READ, WRITE, Event, Item

_TIMEOUT_S = 300.0  # for a buffer to become free
_REMEMBERED = 100_000  # events


@dataclass(frozen=True)
class Ahead:
    """An item that is read, or being read, into a buffer."""

    name: str
    buffer: int
    transfer: FileTransfer


class ReadAhead:
    """Moves `items` between `files` and `num_buffers` buffers, in the order of `plan`.

    `events` and `peak_live`, the most buffers that were not free, say what happened. The error of a
    write is raised by whatever is called next.
    """

    def __init__(self, files: TensorFiles, items: Mapping[str, Item], num_buffers: int) -> None:
        self.files, self.items = files, dict(items)
        largest = max((item.nbytes for item in self.items.values()), default=0)
        self.buffers = [aligned_empty(largest, torch.uint8) for _ in range(num_buffers)]
        self.events: deque[Event] = deque(maxlen=_REMEMBERED)
        self.peak_live = 0
        self._free = deque(range(num_buffers))
        self._coming: deque[str] = deque()  # planned, and no buffer yet
        self._ahead: deque[Ahead] = deque()  # in the order of the plan
        self._held: set[str] = set()  # read, and not released: their files are not up to date
        self._failed: FileTransfer | None = None  # a write, of which nobody has been told
        self._refused: BaseException | None = None  # why the plan did not go on
        self._changed = threading.Condition()

    @property
    def live(self) -> int:
        """Buffers that are being read into, used, or written from."""
        return len(self.buffers) - len(self._free)

    def due(self) -> str | None:
        """The next item of the plan."""
        with self._changed:
            self._raise_failed()
            if self._ahead:
                return self._ahead[0].name
            return self._coming[0] if self._coming else None

    def plan(self, names: Sequence[str]) -> None:
        """Read these after what is planned already, as far as there are buffers."""
        with self._changed:
            self._raise_failed()
            self._coming.extend(names)
            self._go_on()
            self._raise_failed()

    def is_ready(self) -> bool:
        """Whether the next item of the plan has been read."""
        with self._changed:
            return bool(self._ahead) and self._ahead[0].transfer.is_completed()

    def next(self) -> Ahead:
        """The next item of the plan, as soon as there is a buffer for it; the caller's from now."""
        with self._changed:
            self._wait_for(
                lambda: bool(self._ahead or self._failed or self._refused), "free to read into"
            )
            self._raise_failed()
            return self._ahead.popleft()

    def free(self) -> int:
        """A buffer with nothing in it, as soon as there is one; the caller's from now."""
        with self._changed:
            self._wait_for(lambda: bool(self._free), "free to write from")
            self._raise_failed()
            return self._take()

    def whole(self, name: str, buffer: int) -> Tensor:
        """The item in the buffer: (planes, stride)."""
        return self.items[name].whole(self.buffers[buffer])

    def release(self, name: str, buffer: int, write: bool) -> None:
        """The caller has done with it; begin to write, or let it be read into."""
        with self._changed:
            self._held.discard(name)
            if not write:
                self._give_back(buffer)
                return
            try:
                transfer = self.files.write(name, self.whole(name, buffer), durable=False)
            except BaseException:
                self._give_back(buffer)
                raise
            transfer.then(partial(self._written, buffer))
            self._go_on()  # this very item may be what comes next

    def forget(self, ahead: Ahead) -> None:
        """What is read there is wanted no longer."""
        with self._changed:
            self._held.discard(ahead.name)
        ahead.transfer.then(partial(self._forgotten, ahead.buffer))

    def drop(self) -> None:
        """Give up the plan, and forget what has been read ahead."""
        with self._changed:
            self._coming.clear()
            while self._ahead:
                self.forget(self._ahead.popleft())

    def drain(self) -> None:
        """Return when only what is read ahead has buffers."""
        with self._changed:
            self._wait_for(lambda: self.live == len(self._ahead), "written behind")
            self._raise_failed()

    def note(self, what: str, name: str, buffer: int, start_s: float, end_s: float) -> None:
        self.events.append(Event(start_s, end_s, what, name, buffer, self.items[name].nbytes))

    def _go_on(self) -> None:
        """Begin to read what comes next; never raises, for it may be a thread of the files."""
        while self._coming and self._free and self._coming[0] not in self._held:
            name, buffer = self._coming.popleft(), self._take()
            try:
                transfer = self.files.read(name, self.whole(name, buffer))
            except BaseException as error:
                self._refused = error
                self._free.append(buffer)
                self._coming.clear()
                return
            self._ahead.append(Ahead(name, buffer, transfer))
            self._held.add(name)
            transfer.then(partial(self._was_read, buffer))

    def _take(self) -> int:
        buffer = self._free.popleft()
        self.peak_live = max(self.peak_live, self.live)
        return buffer

    def _give_back(self, buffer: int) -> None:
        with self._changed:
            self._free.append(buffer)
            self._go_on()
            self._changed.notify_all()

    # In a thread of the files

    def _was_read(self, buffer: int, transfer: FileTransfer) -> None:
        self.note(READ, transfer.name, buffer, transfer.start_s, transfer.end_s)

    def _written(self, buffer: int, transfer: FileTransfer) -> None:
        self.note(WRITE, transfer.name, buffer, transfer.start_s, transfer.end_s)
        with self._changed:
            if transfer.fails_untold:
                self._failed = self._failed or transfer
                self._coming.clear()
        self._give_back(buffer)

    def _forgotten(self, buffer: int, transfer: FileTransfer) -> None:
        transfer.disregard()
        self._give_back(buffer)

    def _wait_for(self, ready: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(ready, _TIMEOUT_S):
            raise RuntimeError(f"no buffer of {len(self.buffers)} is {what} in {_TIMEOUT_S:g} s")

    def _raise_failed(self) -> None:
        failed, self._failed = self._failed, None
        refused, self._refused = self._refused, None
        if failed is not None:
            failed.wait()
        if refused is not None:
            raise refused
