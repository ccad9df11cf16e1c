"""Folders of files that one process owns: kept, or removed at its end, even if it is killed.

A folder that is not kept has a watcher: a shell that sleeps on a pipe whose other end only the
owner holds. When the owner ends, however that comes, the system closes the pipe, and the shell
removes the folder and ends. A lock tells of each folder whether its owner lives, so that whoever
comes next to the same place removes what an owner and its watcher, killed together, have left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import uuid
import weakref
from functools import partial
from pathlib import Path

_PREFIX, _UNFINISHED = "pdt-tensors-", "new-pdt-tensors-"
_LOCK = "pdt-store"  # a file: locked while the owner lives, it holds the id
_WATCH = 'trap "" HUP INT QUIT TERM; read -r _; rm -rf -- "$1"'
_TIMEOUT_S = 30.0  # for a watcher to end


class Folder:
    """`path`, owned by this process and locked, with an `id` that no other store has.

    keep: `path` is `place` itself, made if it is not there; what it holds stays. Otherwise it is a
    new folder in `place`, and is removed by `close` or when this process ends. Raises RuntimeError
    if somebody owns it, and OSError as the system does.
    """

    def __init__(self, place: Path, keep: bool) -> None:
        self.keep, self._pid = keep, os.getpid()
        place.mkdir(parents=True, exist_ok=True)
        place = place.resolve()  # the process may go elsewhere
        self._fds: list[int] = []  # the lock, and the pipe of the watcher
        self._watcher: subprocess.Popen[bytes] | None = None
        if keep:
            self.path = place
            self._fds.append(_lock(place))
        else:
            remove_ownerless(place)
            self.path = self._new_folder(place)
        self.id = self._read_id()
        # A forked child has the descriptors too, and might outlive the owner.
        os.register_at_fork(after_in_child=partial(_let_go, weakref.ref(self)))

    def close(self) -> None:
        """Remove the folder if it is not kept, and let others own it. No forked child does that."""
        if os.getpid() != self._pid:
            return
        if not self.keep and self._fds:
            shutil.rmtree(self.path, ignore_errors=True)
        self.let_go()
        if self._watcher is not None:
            _end(self._watcher)
            self._watcher = None

    def let_go(self) -> None:
        """Close what shows that the owner lives."""
        while self._fds:
            os.close(self._fds.pop())

    def _new_folder(self, place: Path) -> Path:
        made = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=place))
        self._fds.append(_lock(made))  # before it has a name that others look for
        path = made.with_name(made.name.replace(_UNFINISHED, _PREFIX))
        made.rename(path)
        self._watcher, pipe = _watch(path)
        self._fds.append(pipe)
        return path

    def _read_id(self) -> str:
        """A folder that is kept has it in a file, from its first owner on."""
        known = (self.path / _LOCK).read_text()
        if known:
            return known
        new = uuid.uuid4().hex
        os.write(self._fds[0], new.encode())
        os.fsync(self._fds[0])
        return new


def remove_ownerless(place: Path) -> None:
    """Remove the folders of owners that no longer live."""
    for path in place.glob(f"{_PREFIX}*"):
        try:
            fd = _lock(path)
        except (OSError, RuntimeError):  # somebody else's, or owned
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)


def _lock(path: Path) -> int:
    """The descriptor that holds it; the lock ends with the last process that has it open."""
    fd = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise RuntimeError(
            f"{path} belongs to a store that is open: close that one, or give this one a folder of "
            "its own (one for each rank)"
        ) from error
    return fd


def _watch(path: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A process that removes `path` once the returned end of a pipe is closed everywhere."""
    watched, held = os.pipe()  # neither is inherited by programs that this process starts
    try:
        watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, "pdt-files", str(path)],
            stdin=watched,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": os.defpath},
            start_new_session=True,  # what a terminal or a launcher tells the owner is not for it
        )
    except BaseException:
        os.close(held)
        raise
    finally:
        os.close(watched)
    return watcher, held


def _end(watcher: subprocess.Popen[bytes]) -> None:
    try:
        watcher.wait(_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        watcher.kill()
        watcher.wait(_TIMEOUT_S)


def _let_go(folder: weakref.ref[Folder]) -> None:
    mine = folder()
    if mine is not None:
        mine.let_go()
