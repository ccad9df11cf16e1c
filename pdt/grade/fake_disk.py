"""A disk with one folder, on which a process can be killed and power can fail at every call.

What has been written is in the kernel's memory until it is synced. A killed process leaves all of
it to the next one; a loss of power takes what was not synced: bytes for sure, names perhaps.
"""

from __future__ import annotations

import errno

KILLED = "killed"  # how it may end: all that was written is there,
LOST = "power fails, names kept"  # bytes are as at their last sync, names as they were,
LOST_NAMES = "power fails, names lost"  # names, too, as at their last sync
ENDS = (KILLED, LOST, LOST_NAMES)


class Crash(BaseException):
    """The process ends here."""


class File:
    """Its bytes now, and those that a loss of power leaves."""

    def __init__(self) -> None:
        self.data = self.synced = b""


class FakeDisk:
    """Files by name; each call raises OSError for a name that is not there.

    `crash_at`: the process ends in this call that changes something, counted from 0; an `append`
    has written half by then, any other nothing. From then on every call raises `Crash`. `room`: an
    `append` that would take the files' bytes over it writes half, and raises OSError.
    """

    def __init__(self, *, crash_at: int | None = None, room: int | None = None) -> None:
        self.crash_at, self.room, self.calls = crash_at, room, 0
        self.files: dict[str, File] = {}
        self._synced_names: dict[str, File] = {}
        self._is_dead = False

    def create(self, name: str) -> None:
        """A new, empty file, in place of one that has the name already."""
        self._change()
        self.files[name] = File()

    def append(self, name: str, data: bytes) -> None:
        """Write behind what the file holds."""
        file, half = self._find(name), data[: len(data) // 2]
        try:
            self._change()
        except Crash:
            file.data += half
            raise
        if self.room is not None and len(data) + sum(self.sizes().values()) > self.room:
            file.data += half
            raise OSError(errno.ENOSPC, "no space left on the disk", name)
        file.data += data

    def sync(self, name: str) -> None:
        """The file's bytes outlive a loss of power; not its name."""
        file = self._find(name)
        self._change()
        file.synced = file.data

    def sync_folder(self) -> None:
        """All names, as they are now, outlive a loss of power; not the files' bytes."""
        self._change()
        self._synced_names = dict(self.files)

    def rename(self, old: str, new: str) -> None:
        """At once, in place of a file that had the new name."""
        file = self._find(old)
        self._change()
        self.files[new] = file
        if new != old:
            del self.files[old]

    def remove(self, name: str) -> None:
        self._find(name)
        self._change()
        del self.files[name]

    def read(self, name: str) -> bytes:
        """All bytes of the file."""
        return self._find(name).data

    def names(self) -> list[str]:
        """Of all files, sorted."""
        self._check()
        return sorted(self.files)

    def sizes(self) -> dict[str, int]:
        return {name: len(file.data) for name, file in self.files.items()}

    def after(self, end: str) -> FakeDisk:
        """What the next process finds, after the one before has ended so."""
        found, kept = FakeDisk(), self._synced_names if end == LOST_NAMES else self.files
        for name, file in kept.items():
            left = found.files[name] = File()
            left.data = left.synced = file.data if end == KILLED else file.synced
        found._synced_names = dict(found.files)
        return found

    def _find(self, name: str) -> File:
        self._check()
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return self.files[name]

    def _change(self) -> None:
        self._check()
        self.calls += 1
        if self.calls - 1 == self.crash_at:
            self._is_dead = True
            raise Crash(f"in call {self.crash_at}")

    def _check(self) -> None:
        if self._is_dead:
            raise Crash("the process has ended")
