"""Drives lesson 14's SafeFiles through every crash of its write, and every damage to its file."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

from pdt.grade.fake_disk import ENDS, Crash, FakeDisk

ROUND_TRIP, CRASH, DAMAGE, FULL = "round trip", "a crash at each call", "damage", "a full disk"
MAX_CALLS = 60  # of one write, in which it is tried


def drive(learner: Callable[..., Any], kind: str, contents: list[str]) -> Any:
    """What was seen in a trial of this kind; bytes come and go as hexadecimal text."""
    return {ROUND_TRIP: _round_trip, CRASH: _crashes, DAMAGE: _damages, FULL: _full}[kind](
        learner, [bytes.fromhex(content) for content in contents]
    )


def _text(value: Any) -> str:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    return f"{type(value).__name__}, which is no bytes"


def _read(learner: Callable[..., Any], disk: FakeDisk, name: str = "w") -> str:
    """What a new process reads, or the name of the error that it gets."""
    try:
        return _text(learner(disk).read(name))
    except (ValueError, OSError, LookupError, struct.error) as error:
        return type(error).__name__


def _round_trip(learner: Callable[..., Any], contents: list[bytes]) -> list[Any]:
    """By content: read at once, by a new process, and the files there are."""
    disk, seen = FakeDisk(), []
    files = learner(disk)
    files.write("other", contents[-1])
    for content in contents:
        files.write("w", content)
        seen.append([_text(files.read("w")), _read(learner, disk), disk.names()])
    return [*seen, [_read(learner, disk, "other"), contents[-1].hex(), disk.names()]]


def _crashes(learner: Callable[..., Any], contents: list[bytes]) -> list[Any]:
    """By call and end: what the next process reads, and after its own write; and the files."""
    old, new, third = contents
    seen: list[Any] = []
    for call in [*range(MAX_CALLS), None]:  # at last without a crash
        disk, is_over = _written(learner, old), True
        disk.crash_at, disk.calls = call, 0
        try:
            learner(disk).write("w", new)
        except Crash:
            is_over = False
        for end in ENDS:
            left = disk.after(end)
            found = _read(learner, left)
            learner(left).write("w", third)
            seen.append([is_over, end, found, _read(learner, left), left.names(), call])
        if is_over:
            break
    return seen


def _written(learner: Callable[..., Any], content: bytes) -> FakeDisk:
    """A disk with this content, which has been there for long."""
    disk = FakeDisk()
    learner(disk).write("w", content)
    for name in disk.names():
        disk.sync(name)
    disk.sync_folder()
    return disk


def _damages(learner: Callable[..., Any], contents: list[bytes]) -> list[Any]:
    """By content and damage: what is read after."""
    seen = []
    for content in contents:
        whole = _written(learner, content).read("w")
        for what, changed in _changes(whole):
            disk = _written(learner, content)
            disk.files["w"].data = changed
            seen.append([what, len(content), _read(learner, disk)])
    return seen


def _changes(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """What may become of a file; each is another file than this one."""
    for cut in {0, 1, len(whole) // 2, max(len(whole) - 1, 0)}:
        if cut < len(whole):
            yield f"cut to {cut} of {len(whole)} bytes", whole[:cut]
    yield "a byte more at its end", whole + b"\0"
    for place in range(0, len(whole), max(1, len(whole) // 40)):
        flipped = bytes([whole[place] ^ (1 << place % 8)])
        yield f"a bit of byte {place} flipped", whole[:place] + flipped + whole[place + 1 :]
    if any(whole):
        yield "all zeros", bytes(len(whole))


def _full(learner: Callable[..., Any], contents: list[bytes]) -> Any:
    """What is raised, what is read after, and the files."""
    disk, raised = _written(learner, contents[0]), "nothing"
    disk.room = sum(disk.sizes().values()) + len(contents[1]) // 2
    try:
        learner(disk).write("w", contents[1])
    except OSError as error:
        raised = type(error).__name__
    disk.room = None
    return [raised, _read(learner, disk), disk.names()]
