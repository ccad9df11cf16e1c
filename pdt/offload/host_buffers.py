"""Buffers on the host that serve again: pinned memory is slow to allocate."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from pdt.offload.bus import Bus, Transfer


class HostBuffers:
    """Hands out flat buffers of bytes, and takes them back.

    A buffer serves again for the same number of bytes. Of other sizes free ones are dropped before
    a new one is made, so that no more is ever held than was once in use at the same time.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._free: dict[int, deque[tuple[Tensor, Transfer | None]]] = {}  # by bytes
        self._held: dict[int, Tensor] = {}
        self._held_nbytes = self._used_nbytes = self._most_nbytes = 0

    @property
    def tensors(self) -> list[Tensor]:
        """All buffers, in use or free."""
        return list(self._held.values())

    def take(self, nbytes: int) -> Tensor:
        """A buffer (nbytes,) of uint8 that no transfer reads any longer."""
        self._used_nbytes += nbytes
        self._most_nbytes = max(self._most_nbytes, self._used_nbytes)
        free = self._free.get(nbytes)
        if free and (free[0][1] is None or free[0][1].is_completed()):
            return free.popleft()[0]
        while self._held_nbytes + nbytes > self._most_nbytes and self._drop_one():
            pass
        buffer = self._bus.empty(nbytes, torch.uint8)
        self._held[id(buffer)] = buffer
        self._held_nbytes += nbytes
        return buffer

    def give(self, buffer: Tensor, reader: Transfer | None = None) -> None:
        """Take a buffer back; `reader` may still be reading it."""
        self._used_nbytes -= buffer.nbytes
        self._free.setdefault(buffer.nbytes, deque()).append((buffer, reader))

    def _drop_one(self) -> bool:
        """Forget the free buffer of the size that has been free the longest; whether there was."""
        while self._free:
            nbytes = next(iter(self._free))
            if free := self._free[nbytes]:
                buffer, _ = free.popleft()
                del self._held[id(buffer)]
                self._held_nbytes -= nbytes
                return True
            del self._free[nbytes]
        return False
