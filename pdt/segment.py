"""Anonymous memory shared by the ranks of one machine.

On Linux a segment is a memfd: it has no name in any file system, so nothing can be left behind
however a rank ends, and it needs neither `/dev/shm` nor room in it. A peer opens it through
`/proc/<pid>/fd/<n>` of its creator. Elsewhere it is a temporary file, unlinked as soon as every
rank has opened it. Memory is committed page by page, when first touched: a generous segment that
stays empty costs nothing.
"""

import mmap
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


class Segment:
    """`nbytes` bytes of shared memory: made by `create` on one rank and opened by `open` on others.

    Attributes: `path` (what a peer of the same user gives to `open`; valid until the creator closes
    or unlinks it), `nbytes`, `buffer` (the `mmap` itself, for those who want bytes).
    """

    def __init__(self, fd: int, path: str, nbytes: int, *, owned: bool) -> None:
        self.path = path
        self.nbytes = nbytes
        self.buffer: mmap.mmap | None = mmap.mmap(fd, nbytes)
        self._fd = fd if owned else -1
        self._named = owned and not path.startswith("/proc/")
        if not owned:
            os.close(fd)

    @classmethod
    def create(cls, nbytes: int) -> "Segment":
        """Make a zero-filled segment; raises ValueError if `nbytes` is not positive."""
        if nbytes < 1:
            raise ValueError(f"nbytes={nbytes}: a segment needs at least one byte")
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("pdt")
            path = f"/proc/{os.getpid()}/fd/{fd}"
        else:
            fd, path = tempfile.mkstemp(prefix="pdt-")
        os.ftruncate(fd, nbytes)
        return cls(fd, path, nbytes, owned=True)

    @classmethod
    def open(cls, path: str) -> "Segment":
        """Open what another process of this machine and user made; raises OSError if it cannot."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return cls(fd, path, os.fstat(fd).st_size, owned=False)

    def tensor(self, dtype: torch.dtype, numel: int, offset: int = 0) -> torch.Tensor:
        """A 1-D tensor (numel,) of `dtype` that views the memory from byte `offset` on.

        It keeps the memory mapped for as long as it lives, also after `close`.
        """
        end = offset + numel * dtype.itemsize
        if numel < 0 or offset < 0 or end > self.nbytes:
            raise ValueError(f"bytes {offset} to {end} do not lie in a segment of {self.nbytes}")
        if self.buffer is None:
            raise ValueError("the segment is closed")
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.buffer, dtype=dtype, count=numel, offset=offset)

    def unlink(self) -> None:
        """Take away the name in the file system, once all have opened it. A memfd has none."""
        if self._named:
            Path(self.path).unlink(missing_ok=True)
            self._named = False

    def close(self) -> None:
        """Let go of the memory, which is unmapped with the last tensor that views it."""
        # Not buffer.close(): torch.frombuffer holds the mmap object but no Py_buffer, so that an
        # explicit close would unmap the memory under a living tensor.
        self.buffer = None
        self.unlink()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_named"):
            self.close()


def exchange(
    store: dist.Store, key: str, rank: int, world_size: int, nbytes: int, timeout_s: float = 60.0
) -> list[Segment]:
    """Every rank makes a segment of `nbytes` and opens those of all others, through the `store`.

    Returns the segments by rank, on every rank: number `rank` is its own, the others its peers'.
    `key` must be the same on all ranks and new for each exchange. Raises RuntimeError on *every*
    rank, naming the ranks, if one does not come within `timeout_s` or cannot open another's memory.
    """
    deadline = time.monotonic() + timeout_s
    own = Segment.create(nbytes)
    try:
        assert own.buffer is not None
        store.set(f"{key}/made/{rank}", f"{own.path} {_inode(own.path)} {nbytes}")
        made = _gather(store, f"{key}/made", world_size, deadline)
        segments, trouble = _open_all(own, rank, made)
        store.set(f"{key}/opened/{rank}", trouble or "ok")
        opened = _gather(store, f"{key}/opened", world_size, deadline)
        if failed := [text for text in opened if text != "ok"]:
            raise RuntimeError("; ".join(failed))
    except BaseException:
        own.close()
        raise
    own.unlink()
    return segments


def _inode(path: str) -> int:
    return os.stat(path).st_ino


def _gather(store: dist.Store, key: str, world_size: int, deadline: float) -> list[str]:
    """What each rank has set under `key`/rank; names those that have not by the deadline."""
    keys = [f"{key}/{rank}" for rank in range(world_size)]
    left_s = max(deadline - time.monotonic(), 0.01)
    try:
        store.wait(keys, timedelta(seconds=left_s))
    except RuntimeError as error:
        missing = [rank for rank, name in enumerate(keys) if not store.check([name])]
        raise RuntimeError(
            f"ranks {missing} did not come to share memory within the time-out: "
            "have they started, and do they make the same groups in the same order?"
        ) from error
    return [store.get(name).decode() for name in keys]


def _open_all(own: Segment, rank: int, made: list[str]) -> tuple[list[Segment], str]:
    """The segments by rank, and what went wrong (empty if nothing did)."""
    segments, trouble = [], ""
    for peer, text in enumerate(made):
        path, inode, nbytes = text.rsplit(" ", 2)
        try:
            if peer == rank:
                segments.append(own)
                continue
            if int(nbytes) != own.nbytes:
                raise ValueError(f"it has {nbytes} bytes where rank {rank} has {own.nbytes}")
            # In another PID namespace the same path may exist and mean some other file.
            if _inode(path) != int(inode):
                raise FileNotFoundError("its path leads to another file here")
            segments.append(Segment.open(path))
        except (OSError, ValueError) as error:
            trouble = f"rank {rank} cannot open the shared memory of rank {peer}: {_advice(error)}"
    return segments, trouble


def _advice(error: Exception) -> str:
    if isinstance(error, PermissionError):
        return f"{error}; run all ranks as the same user"
    if isinstance(error, FileNotFoundError):
        return (
            f"{error}; put all ranks in one PID namespace (container) of one machine, or use gloo"
        )
    return str(error)
