"""Runs a command with limits on time and memory, and leaves no process of it behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1
OUTPUT_NBYTES = 4000  # how much of the end of what it prints is kept


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (minus the signal), or the limit that ended it."""

    code: int
    limit: str = ""
    output: str = ""


def run_limited(
    command: list[str], *, env: Mapping[str, str], timeout_s: float, memory_nbytes: int
) -> Ended:
    """Run `command` until its end, or until it and all it started pass a limit together.

    Memory is what the whole tree holds for itself (anonymous and shared pages), looked at ten times
    a second; on Linux, elsewhere only time is limited.
    """
    process = subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    output = bytearray()
    reader = threading.Thread(target=_keep_the_end, args=(process, output), daemon=True)
    reader.start()
    limit = ""
    try:
        limit = _watch(process, time.monotonic() + timeout_s, memory_nbytes)
    finally:
        for pid in [process.pid, *descendants(process.pid)]:
            _kill(pid)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    reader.join(1.0)  # it ends with the last process that holds the pipe
    return Ended(code, limit, bytes(output).decode(errors="replace"))


def _watch(process: subprocess.Popen, deadline_s: float, memory_nbytes: int) -> str:
    """Wait for the end; the limit that was passed before, if one was."""
    while True:
        try:
            process.wait(POLL_S)
            return ""
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() > deadline_s:
            return "time"
        tree = [process.pid, *descendants(process.pid)]
        if sum(map(held_nbytes, tree)) > memory_nbytes:
            return "memory"


def _keep_the_end(process: subprocess.Popen, output: bytearray) -> None:
    assert process.stdout is not None
    while data := os.read(process.stdout.fileno(), 1 << 16):
        output += data
        del output[:-OUTPUT_NBYTES]


def held_nbytes(pid: int) -> int:
    """What a process holds in memory apart from files; 0 where nobody says."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    held = [line.split()[1] for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(map(int, held)) * 1024


def children() -> dict[int, list[int]]:
    """By pid: the pids of its children, of all processes that can be seen. Linux; else empty."""
    found: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(stat.parent.name))
    return found


def descendants(pid: int) -> list[int]:
    """The pids of all that a process has started, directly or not."""
    by_parent, found, queue = children(), [], [pid]
    while queue:
        queue += (own := by_parent.get(queue.pop(), []))
        found += own
    return found


@contextmanager
def no_orphans() -> Iterator[None]:
    """Processes that lose their parent within the block come to us and are killed at its end.

    So are other children that were started in the block. Linux; elsewhere it does nothing.
    """
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    before = set(children().get(os.getpid(), []))
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        deadline_s = time.monotonic() + 5.0
        while (
            left := set(children().get(os.getpid(), [])) - before
        ) and time.monotonic() < deadline_s:
            for pid in left:
                for each in [*descendants(pid), pid]:
                    _kill(each)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
