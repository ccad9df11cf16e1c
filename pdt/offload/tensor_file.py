"""One tensor in one file, and how it is known to be the one that was written.

    cover | the tensor's bytes | zeros up to a whole block | the same cover

A cover is a block that says whose file it is, which of the writes of its name, dtype, shape, and
the checksum of the bytes. A write that is cut short, before or after, leaves covers that differ or
a file of another size; a bit that flips is seen by a checksum of the cover or of the bytes.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdt.offload.aligned import (
    BLOCK_NBYTES,
    BOUNCE_NBYTES,
    aligned_empty,
    bytes_of,
    move_all,
    open_file,
    padded,
    receive,
    send,
)

UNFINISHED = ".new"  # at the end of the name of what is being written durably
_MAGIC = b"pdt-tensor-1"
_CRC_NBYTES, _LENGTH_NBYTES = 4, 4
_WORD_NBYTES = 8
_HEAD_NBYTES = len(_MAGIC) + _CRC_NBYTES + _LENGTH_NBYTES


class DamagedFile(RuntimeError):
    """A file is not what was written: short, changed, older, or another's."""


@dataclass(frozen=True)
class Cover:
    """What a file says of its tensor; `number` counts the writes of this name.

    `checksum` is that of the tensor's bytes, or None where nobody asked for one.
    """

    store: str
    name: str
    number: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: int | None

    @property
    def file_nbytes(self) -> int:
        return 2 * BLOCK_NBYTES + padded(self.nbytes)

    def block(self) -> bytes:
        """The cover as it stands in the file, BLOCK_NBYTES long."""
        text = json.dumps(
            {field.name: getattr(self, field.name) for field in fields(self)}
        ).encode()
        if len(text) > BLOCK_NBYTES - _HEAD_NBYTES:
            raise ValueError(f"{self.name!r}: a cover of {len(text)} bytes has no room in a block")
        rest = len(text).to_bytes(_LENGTH_NBYTES, "little") + text
        rest = rest.ljust(BLOCK_NBYTES - len(_MAGIC) - _CRC_NBYTES, b"\0")
        return _MAGIC + zlib.crc32(rest).to_bytes(_CRC_NBYTES, "little") + rest

    def differences(self, found: Cover) -> str:
        """Field by field, what is expected and what was found; empty if all is equal."""
        return "; ".join(
            f"{field.name}: expected {getattr(self, field.name)!r}, "
            f"found {getattr(found, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(found, field.name)
        )


def checksum(data: Tensor) -> int:
    """Of bytes (nbytes,), wherever they lie: CRC-32 over the sum of the words of each block.

    A sum costs a fifth of a CRC of all bytes. It sees any word that has changed, and misses only
    changes within one block that cancel; the CRC sees blocks that have changed places.
    """
    whole = data.numel() - data.numel() % BLOCK_NBYTES
    has_words = data.data_ptr() % _WORD_NBYTES == data.storage_offset() % _WORD_NBYTES == 0
    crc = 0
    for piece in data[:whole].split(max(whole, 1) if has_words else BOUNCE_NBYTES):
        words = (piece if has_words else piece.clone()).view(torch.int64)
        sums = words.view(piece.numel() // BLOCK_NBYTES, BLOCK_NBYTES // _WORD_NBYTES).sum(1)
        crc = zlib.crc32(bytes_of(sums), crc)
    return zlib.crc32(bytes_of(data[whole:]), crc)


def save(path: Path, cover: Cover, data: Tensor, direct: bool) -> None:
    """Write the bytes `data` (nbytes,) over what the file holds, or into a new one.

    Raises OSError; a file that could not be written whole is removed then.
    """
    block = cover.block()
    fd = open_file(path, os.O_CREAT | os.O_WRONLY, direct)
    try:
        send(fd, block, data, direct)
        if os.fstat(fd).st_size != cover.file_nbytes:
            os.ftruncate(fd, cover.file_nbytes)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def save_durably(path: Path, cover: Cover, data: Tensor, direct: bool) -> None:
    """As `save`, and at every moment the file holds all of the old content or all of the new.

    When it returns, the new content is on the disk.
    """
    beside = path.with_name(path.name + UNFINISHED)
    try:
        beside.unlink(missing_ok=True)
        save(beside, cover, data, direct)
        sync(beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """What has been written to this file, or into this folder, outlives a loss of power."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def load(path: Path, cover: Cover, data: Tensor, direct: bool) -> None:
    """Read the bytes of the tensor that `cover` describes into `data` (nbytes,).

    Raises DamagedFile, with what was expected and found, and OSError as the system does; `data` is
    worth nothing then.
    """
    fd = open_file(path, os.O_RDONLY, direct)
    try:
        found_nbytes = os.fstat(fd).st_size
        if found_nbytes != cover.file_nbytes:
            raise DamagedFile(
                f"{path} has {found_nbytes} bytes, expected {cover.file_nbytes} for "
                f"{cover.name!r}, {cover.dtype} {cover.shape}"
            )
        covers = receive(fd, data, direct)
    finally:
        os.close(fd)
    _check(path, cover, *(bytes_of(block) for block in covers))
    if cover.checksum is not None and (seen := checksum(data)) != cover.checksum:
        raise DamagedFile(
            f"{path}: the bytes of {cover.name!r} have changed since write {cover.number}: "
            f"expected checksum {cover.checksum:#010x}, found {seen:#010x}"
        )


def peek(path: Path) -> Cover:
    """The cover of a file that somebody else wrote; raises DamagedFile and FileNotFoundError."""
    block = aligned_empty(BLOCK_NBYTES, torch.uint8)
    fd = open_file(path, os.O_RDONLY, direct=False)
    try:
        if (nbytes := os.fstat(fd).st_size) < 2 * BLOCK_NBYTES:
            raise DamagedFile(f"{path} has {nbytes} bytes, expected {2 * BLOCK_NBYTES} or more")
        move_all(os.preadv, fd, [block], 0)
    finally:
        os.close(fd)
    return _parsed(path, bytes(bytes_of(block)), "first")


def _check(path: Path, cover: Cover, first: memoryview, last: memoryview) -> None:
    expected = cover.block()
    for block, place in ((first, "first"), (last, "last")):
        if block != expected:
            found = _parsed(path, bytes(block), place)
            raise DamagedFile(f"{path}, {place} cover: {cover.differences(found)}")


def _parsed(path: Path, block: bytes, place: str) -> Cover:
    crc, rest = block[len(_MAGIC) :][:_CRC_NBYTES], block[len(_MAGIC) + _CRC_NBYTES :]
    if not block.startswith(_MAGIC):
        seen = block[: len(_MAGIC)]
        raise DamagedFile(f"{path}, {place} cover: expected {_MAGIC!r}, found {seen!r}")
    if zlib.crc32(rest) != int.from_bytes(crc, "little"):
        raise DamagedFile(f"{path}: its {place} cover does not match its own checksum")
    length = int.from_bytes(rest[:_LENGTH_NBYTES], "little")
    values: dict[str, Any] = json.loads(rest[_LENGTH_NBYTES : _LENGTH_NBYTES + length])
    return Cover(**{**values, "shape": tuple(values["shape"])})
