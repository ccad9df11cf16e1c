"""Memory and places in a file as a disk takes them, so that it reads and writes without a detour.

With `O_DIRECT` the disk copies from and to a process's own memory, and the kernel keeps no copy of
the file. Then memory, length and place in the file must be multiples of a block; what is not goes
through a buffer that is: the last, partly filled block, or all of a tensor that begins elsewhere.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

BLOCK_NBYTES = 4096  # a multiple of every disk's block, and of no more than a page
BOUNCE_NBYTES = 2**20  # for what is not aligned, at a time
_DIRECT = getattr(os, "O_DIRECT", 0)  # some systems have none

Move = Callable[[int, Sequence[memoryview], int], int]  # os.preadv, os.pwritev


def padded(nbytes: int) -> int:
    """`nbytes` up to whole blocks."""
    return -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES


def aligned_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory of the host (numel,) that begins at a page; it is zero, and committed when touched."""
    nbytes = numel * dtype.itemsize
    # Shared with forked children, so that a fork while the disk fills it does not part the
    # process from the pages that are being filled: open(2), "O_DIRECT".
    memory = mmap.mmap(-1, max(padded(nbytes), BLOCK_NBYTES))
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes].view(dtype)


def is_aligned(data: Tensor) -> bool:
    """Whether a disk can copy from and to its memory directly."""
    return data.data_ptr() % BLOCK_NBYTES == 0


def direct_works(folder: Path) -> bool:
    """Whether the file system of `folder` takes `O_DIRECT`."""
    probe = folder / f"pdt-direct-{os.getpid()}"
    try:
        fd = open_file(probe, os.O_CREAT | os.O_RDWR, direct=True)
        try:
            move_all(os.pwritev, fd, [aligned_empty(BLOCK_NBYTES, torch.uint8)], 0)
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return _DIRECT != 0


def open_file(path: Path, flags: int, direct: bool) -> int:
    """A descriptor that no other program inherits; files that it makes are the user's alone."""
    return os.open(path, flags | os.O_CLOEXEC | (_DIRECT if direct else 0), 0o600)


def bytes_of(data: Tensor) -> memoryview:
    """The memory of a contiguous tensor, which must outlive it."""
    if data.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * data.nbytes).from_address(data.data_ptr())).cast("B")


def move_all(move: Move, fd: int, parts: Sequence[Tensor], offset: int) -> int:
    """Read or write `parts`, one behind the other, from `offset` on; returns where they end.

    Goes on after a call that moved less. Raises OSError as the system does, and where
    nothing more is moved.
    """
    views = [bytes_of(part) for part in parts if part.nbytes]
    while views:
        moved = move(fd, views, offset)
        if moved <= 0:
            raise OSError(errno.EIO, f"nothing is moved at byte {offset}")
        offset += moved
        while views and moved >= len(views[0]):
            moved -= len(views.pop(0))
        if moved:
            views[0] = views[0][moved:]
            if moved % BLOCK_NBYTES and _DIRECT:  # what is left lies nowhere a disk could take it
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)
    return offset


def send(fd: int, cover: bytes, data: Tensor, direct: bool) -> None:
    """Write `cover`, a block, then the bytes of `data`, zeros up to whole blocks, `cover` again.

    In this order, so that a write cut short leaves two covers that differ.
    """
    straight = _straight_nbytes(data, direct)
    first, _, bounce = _scratch(data.nbytes - straight)
    bytes_of(first)[:] = cover
    parts, offset = [first, data[:straight]], 0
    for number, piece in enumerate(data[straight:].split(BOUNCE_NBYTES)):
        if number:
            offset, parts = move_all(os.pwritev, fd, parts, offset), []
        whole = bounce[: padded(piece.numel())]
        whole[: piece.numel()] = piece
        whole[piece.numel() :] = 0
        parts.append(whole)
    move_all(os.pwritev, fd, [*parts, first], offset)


def receive(fd: int, data: Tensor, direct: bool) -> tuple[Tensor, Tensor]:
    """Read what `send` wrote into `data`; returns both covers, bytes (BLOCK_NBYTES,)."""
    straight = _straight_nbytes(data, direct)
    first, last, bounce = _scratch(data.nbytes - straight)
    parts, offset = [first, data[:straight]], 0
    pieces = data[straight:].split(BOUNCE_NBYTES)
    for before, piece in zip((None, *pieces), pieces, strict=False):
        if before is not None:
            offset, parts = move_all(os.preadv, fd, parts, offset), []
            before.copy_(bounce[: before.numel()])
        parts.append(bounce[: padded(piece.numel())])
    move_all(os.preadv, fd, [*parts, last], offset)
    pieces[-1].copy_(bounce[: pieces[-1].numel()])
    return first, last


def _scratch(detour_nbytes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two blocks, and room for so much of what takes a detour as takes it at a time."""
    bounce_nbytes = min(padded(detour_nbytes), BOUNCE_NBYTES)
    whole = aligned_empty(2 * BLOCK_NBYTES + bounce_nbytes, torch.uint8)
    return whole[:BLOCK_NBYTES], whole[BLOCK_NBYTES:][:BLOCK_NBYTES], whole[2 * BLOCK_NBYTES :]


def _straight_nbytes(data: Tensor, direct: bool) -> int:
    """How much of `data` needs no detour: whole blocks, if it begins where the disk can take it."""
    whole = data.nbytes - data.nbytes % BLOCK_NBYTES
    return whole if is_aligned(data) or not direct else 0
