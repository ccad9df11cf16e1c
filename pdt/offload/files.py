"""Tensors in files: written and read by threads, checked, and gone when the process is.

    TensorFiles.write(name, tensor) -> FileTransfer     one file per name (`tensor_file`)
    TensorFiles.read(name, out)     -> FileTransfer     by a few threads (`file_threads`)

Memory of `aligned_empty` goes to the disk and back without a copy (`aligned`). The folder is the
store's own (`folder`). ZeRO-Infinity keeps its states so: Rajbhandari et al. 2021, section 6.3
(arXiv:2104.07857).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, deque
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pdt.comm.topology import Link
from pdt.measure.timeline import Span
from pdt.offload.aligned import aligned_empty, direct_works
from pdt.offload.file_threads import DELETE, READ, WRITE, FileThreads, FileTransfer
from pdt.offload.folder import Folder
from pdt.offload.shelf import Shelf
from pdt.offload.tensor_file import DamagedFile

__all__ = ["DamagedFile", "FileTransfer", "TensorFiles", "aligned_empty"]

_REMEMBERED = 10_000  # transfers whose times are kept


class TensorFiles:
    """Named tensors of the host in files of a folder of this process.

    keep: the files lie in `folder` itself and stay; a later store finds them. Otherwise they lie in
        a new folder inside it, which goes with `close` or with the process, even if it is killed.
    threads: how many files are read or written at a time.
    direct: past the kernel's cache (`O_DIRECT`): None where the file system can, True insists, with
        ValueError if it cannot. The attribute `direct` says what is done.
    checksums: of the bytes, computed by each write and compared by each read.
    link: latency and bandwidth (bytes per second, each direction has its own) of an emulated disk.

    Only `names`, `spans`, `flush` and `close` wait for anything. One name's transfers happen in the
    order of the calls. Errors come from the transfer's `wait()`, and from `close` if nobody waited:
    DamagedFile where a file is not what was last written, OSError with the bytes wanted and free
    where the disk is full or forbidden.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: bool = False,
        threads: int = 4,
        direct: bool | None = None,
        checksums: bool = True,
        link: Link | None = None,
    ) -> None:
        if threads < 1:
            raise ValueError(f"threads={threads}: at least one is needed")
        self.keep = keep
        self.transfers: deque[FileTransfer] = deque(maxlen=_REMEMBERED)
        self._folder = Folder(Path(folder), keep)
        self._nbytes: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        try:
            self.direct = _decide(direct, self.folder)
        except BaseException:
            self._folder.close()
            raise
        self._shelf = Shelf(self._folder, self.direct, checksums)
        self._threads = FileThreads(threads, link)
        self._end = weakref.finalize(self, _finish, self._threads, self._folder)

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        try:
            self.close()
        except Exception as late:
            if error is None:
                raise
            error.add_note(f"and, when the files were closed: {late}")

    def __repr__(self) -> str:
        how = "direct" if self.direct else "through the kernel's cache"
        return f"TensorFiles({str(self.folder)!r}, {how}, {'kept' if self.keep else 'not kept'})"

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._folder.path

    def path(self, name: str) -> Path:
        """The file of this name; raises ValueError for one that is empty or too long."""
        return self._shelf.path(name)

    def write(self, name: str, tensor: Tensor, *, durable: bool | None = None) -> FileTransfer:
        """Begin to write; `tensor` must stay as it is until the transfer is completed.

        durable: beside the old content, which it replaces at once when all is on the disk, so that
        a crash at any moment leaves one or the other. Otherwise over the old content, which is
        faster and is lost if this fails; a reader sees that. None: durable if the store is kept.
        """
        _check_host(name, tensor)
        durable = self.keep if durable is None else durable
        work = partial(self._shelf.write, name, tensor.detach(), durable)
        return self._submit(FileTransfer(work, tensor.nbytes, WRITE, name))

    def read(self, name: str, out: Tensor) -> FileTransfer:
        """Begin to read into `out`, of the dtype and shape that were written.

        Its `wait()` raises KeyError for a name that has not been written, ValueError for an `out`
        of another dtype or shape, and what the class says.
        """
        _check_host(name, out)
        work = partial(self._shelf.read, name, out.detach())
        return self._submit(FileTransfer(work, out.nbytes, READ, name))

    def delete(self, name: str) -> FileTransfer:
        """Begin to remove the file; `wait()` raises KeyError if there is none."""
        return self._submit(FileTransfer(partial(self._shelf.delete, name), 0, DELETE, name))

    def names(self) -> list[str]:
        """Of all that can be read, sorted, after what is under way."""
        self._threads.drain()
        return self._shelf.names()

    def flush(self) -> None:
        """Return when nothing is under way; raises the first error that nobody has been told of."""
        self._threads.drain()
        _raise_first(self._threads.untold())

    def close(self) -> None:
        """As `flush`, then end the threads; the files go unless they are kept. May be repeated."""
        self._end()
        _raise_first(self._threads.untold())

    def nbytes(self, direction: str) -> int:
        """Bytes of tensors in "read" or "write" since `clear`."""
        return self._nbytes[_known(direction)]

    def calls(self, direction: str) -> int:
        """Transfers "read" or "write" since `clear`."""
        return self._calls[_known(direction)]

    def spans(self, rank: int = 0) -> list[Span]:
        """When the latest reads and writes happened, for a `Timeline`, after what is under way."""
        self._threads.drain()
        return [
            Span(t.name, t.start_s, t.end_s, t.direction, t.direction, rank, t.nbytes)
            for t in self.transfers
            if t.direction != DELETE
        ]

    def clear(self) -> None:
        """Forget what has been counted."""
        self.transfers.clear()
        self._nbytes.clear()
        self._calls.clear()

    def _submit(self, transfer: FileTransfer) -> FileTransfer:
        self.path(transfer.name)  # raises for a name that is none
        self._threads.submit(transfer)
        self.transfers.append(transfer)
        self._nbytes[transfer.direction] += transfer.nbytes
        self._calls[transfer.direction] += 1
        return transfer


def _decide(direct: bool | None, folder: Path) -> bool:
    works = direct is not False and direct_works(folder)
    if direct and not works:
        raise ValueError(f"direct=True, and the file system of {folder} does not take O_DIRECT")
    return works


def _finish(threads: FileThreads, folder: Folder) -> None:
    if threads.are_current():  # the store's last user was a thread of its own, which is at work
        threading.Thread(target=_finish, args=(threads, folder), daemon=True).start()
        return
    try:
        threads.close()
    finally:
        folder.close()


def _check_host(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"{name!r}: files take dense tensors of the host, got {tensor.dtype} {tensor.layout} "
            f"on {tensor.device}: copy it to the host first"
        )


def _known(direction: str) -> str:
    if direction not in (READ, WRITE):
        raise ValueError(f"direction={direction!r} is neither {READ!r} nor {WRITE!r}")
    return direction


def _raise_first(errors: list[BaseException]) -> None:
    if errors:
        first, *others = errors
        for other in others:
            first.add_note(f"and {other}")
        raise first
