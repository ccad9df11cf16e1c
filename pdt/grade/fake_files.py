"""Files without clocks: what is read or written is carried only when somebody waits for it.

So what a program reads too soon is NaN, what it overwrites too soon is lost, on every machine, and
the order of events says what would have run at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

READ, WRITE, USE = "read", "write", "use"
Event = tuple[str, str, int]  # what, the file's name, the buffer's number


class FakeFileTransfer:
    """Under way until `wait`, which first ends what was begun before in its direction or file."""

    def __init__(self, files: FakeFiles, what: str, name: str, buffer: Tensor) -> None:
        self._files, self.what, self.name, self.buffer = files, what, name, buffer

    def wait(self) -> None:
        self._files.wait_for(self)


class FakeFiles:
    """`read(name, buffer)` and `write(name, buffer)` as `pdt.offload.files.TensorFiles` has them.

    `buffer()` makes a buffer, as long as every file. `log` has each beginning, each end ("read
    over", "write over") and, by the grader, each use, in their order.
    """

    def __init__(self, contents: dict[str, Tensor]) -> None:
        self.contents = {name: content.clone() for name, content in contents.items()}
        self.log: list[Event] = []
        self.made: list[Tensor] = []
        self._under_way: deque[FakeFileTransfer] = deque()

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def buffer(self) -> Tensor:
        """Memory for any one of the files."""
        self.made.append(torch.full_like(next(iter(self.contents.values())), torch.nan))
        return self.made[-1]

    def read(self, name: str, buffer: Tensor) -> FakeFileTransfer:
        """Begin to read into `buffer`."""
        self._number(buffer)
        buffer.fill_(torch.nan)
        return self._start(READ, name, buffer)

    def write(self, name: str, buffer: Tensor) -> FakeFileTransfer:
        """Begin to write `buffer`, which must stay as it is until this has ended."""
        return self._start(WRITE, name, buffer)

    def wait_for(self, wanted: FakeFileTransfer) -> None:
        if wanted not in self._under_way:
            return
        before = list(self._under_way)[: self._under_way.index(wanted)]
        for other in before:
            if other.what == wanted.what or other.name == wanted.name:
                self.wait_for(other)
        self._under_way.remove(wanted)
        if wanted.what == READ:
            wanted.buffer.copy_(self.contents[wanted.name])
        else:
            self.contents[wanted.name] = wanted.buffer.clone()
        self.log.append((f"{wanted.what} over", wanted.name, self._number(wanted.buffer)))

    def note_use(self, name: str, buffer: Tensor) -> None:
        self.log.append((USE, name, self._number(buffer)))

    def _start(self, what: str, name: str, buffer: Tensor) -> FakeFileTransfer:
        if name not in self.contents:
            raise ValueError(f"{what} {name!r}: the files are {', '.join(self.contents)}")
        self.log.append((what, name, self._number(buffer)))
        self._under_way.append(FakeFileTransfer(self, what, name, buffer))
        return self._under_way[-1]

    def _number(self, buffer: Tensor) -> int:
        """Which of the buffers it is; ValueError for memory of another origin."""
        for number, own in enumerate(self.made):
            if own is buffer or own.data_ptr() == buffer.data_ptr():
                return number
        raise ValueError("a buffer comes from files.buffer(), and is used whole")


def picture(log: Iterable[Event]) -> str:
    """The events in a row of text."""
    return ", ".join(f"{what} {name}" for what, name, _ in log)
