"""What lies in the files of one folder: which write of each name, and whether it is still that.

The shelf remembers what it wrote. So it tells a file that is whole but older, or another's, from
the right one; of a folder that an earlier process has filled, it trusts what the files say of
themselves.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from pdt.offload.folder import Folder
from pdt.offload.tensor_file import (
    UNFINISHED,
    Cover,
    DamagedFile,
    checksum,
    load,
    peek,
    save,
    save_durably,
    sync,
)

_SUFFIX = ".tensor"
_NAME_NBYTES = 240  # of a file's name, which has 255 on most systems, with the suffix


class Shelf:
    """Writes and reads at once, in the caller's thread; of one name one thing at a time."""

    def __init__(self, folder: Folder, direct: bool, checksums: bool) -> None:
        self._folder, self._direct, self._checksums = folder, direct, checksums
        self._covers: dict[str, Cover] = {}  # of what was written or read since opening
        self._lost: dict[str, BaseException] = {}  # names whose files a failed write has ruined
        for left in folder.path.glob(f"*{_SUFFIX}{UNFINISHED}"):  # by an owner that was killed
            left.unlink(missing_ok=True)

    def path(self, name: str) -> Path:
        """The file of this name; raises ValueError for one that is empty or too long."""
        safe = quote(name, safe="")
        if not 0 < len(safe) <= _NAME_NBYTES:
            raise ValueError(f"name={name!r}: 1 to {_NAME_NBYTES} characters fit a file's name")
        return self._folder.path / (safe + _SUFFIX)

    def names(self) -> list[str]:
        """Of the files that are there, sorted."""
        files = self._folder.path.glob(f"*{_SUFFIX}")
        return sorted(unquote(path.name.removesuffix(_SUFFIX)) for path in files)

    def write(self, name: str, tensor: Tensor, durable: bool) -> None:
        """Beside the old content and then in its place, if `durable`; otherwise over it."""
        path, data = self.path(name), _bytes(tensor)
        cover = Cover(
            store=self._folder.id,
            name=name,
            number=self._number(name) + 1,
            dtype=str(tensor.dtype),
            shape=tuple(tensor.shape),
            nbytes=tensor.nbytes,
            checksum=checksum(data) if self._checksums else None,
        )
        try:
            (save_durably if durable else save)(path, cover, data, self._direct)
        except OSError as error:
            told = _with_room(error, path, cover)
            if _is_gone(path):
                self._lost[name] = told
            raise told from error
        self._covers[name] = cover
        self._lost.pop(name, None)

    def read(self, name: str, out: Tensor) -> None:
        """Raises KeyError, ValueError, DamagedFile and OSError; `out` is worth nothing then."""
        straight = out.is_contiguous() and not out.is_conj() and not out.is_neg()
        target = out if straight else torch.empty(out.shape, dtype=out.dtype)
        path = self.path(name)
        try:
            cover = self._cover(name)
            if (cover.dtype, cover.shape) != (str(out.dtype), tuple(out.shape)):
                raise ValueError(
                    f"{path} holds {cover.dtype} {cover.shape}, which does not go into a tensor "
                    f"{out.dtype} {tuple(out.shape)}"
                )
            load(path, cover, _bytes(target), self._direct)
        except FileNotFoundError as error:
            raise DamagedFile(f"{path} is gone, though it has been written") from error
        except OSError as error:
            text = f"cannot read {name!r}: {error.strerror}; {out.nbytes} bytes wanted"
            raise OSError(error.errno, text, str(path)) from error
        self._covers[name] = cover
        if target is not out:
            with torch.no_grad():
                out.copy_(target)

    def delete(self, name: str) -> None:
        """Raises KeyError for a name that has no file."""
        self._covers.pop(name, None)
        try:
            self.path(name).unlink()
        except FileNotFoundError:
            raise KeyError(f"{name!r} is not in {self._folder.path}") from None
        if self._folder.keep:
            sync(self._folder.path)

    def _number(self, name: str) -> int:
        """Of the latest write, before which there was none with a higher number."""
        if name in self._covers:
            return self._covers[name].number
        try:
            return peek(self.path(name)).number
        except (OSError, DamagedFile):
            return 0

    def _cover(self, name: str) -> Cover:
        if name in self._lost:
            raise RuntimeError(f"{name!r} is lost: a write over it failed") from self._lost[name]
        if name in self._covers:
            return self._covers[name]
        path = self.path(name)
        try:
            found = peek(path)
        except FileNotFoundError:
            raise KeyError(f"{name!r} has not been written in {self._folder.path}") from None
        if (found.store, found.name) != (self._folder.id, name):
            raise DamagedFile(
                f"{path}: expected {name!r} of store {self._folder.id}, found {found.name!r} of "
                f"store {found.store}"
            )
        return found


def _bytes(tensor: Tensor) -> Tensor:
    """Its elements in order, as bytes (nbytes,): its own memory where that is in order."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8)


def _is_gone(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:  # not to be seen
        return False
    return False


def _with_room(error: OSError, path: Path, cover: Cover) -> OSError:
    try:
        room = f"{shutil.disk_usage(path.parent).free} free"
    except OSError:
        room = "how many are free is not known"
    text = (
        f"cannot write {cover.name!r}: {error.strerror}; {cover.file_nbytes} bytes wanted, {room}"
    )
    return OSError(error.errno or errno.EIO, text, str(path))
