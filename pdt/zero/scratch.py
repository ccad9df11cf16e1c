"""Buffers that can be used again.

The system hands out memory by pages, at the first touch of each, and takes large blocks back when
they are freed; so a bucket that is allocated anew in every step pays for its pages every time.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Flat buffers of one owner: `take` lends one, `give` returns it.

    With `keep` it is there for the next taker: as many are kept as were ever lent at the same time,
    and none that has become too small. Else its memory is free, and `take` makes a new one.
    """

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self._free: list[Tensor] = []  # of bytes

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised 1-D tensor of `numel` elements, in the smallest buffer that fits."""
        nbytes = numel * dtype.itemsize
        here = [b for b in self._free if b.device == device]
        fitting = [b for b in here if b.numel() >= nbytes]
        found = min(fitting or here, key=Tensor.numel, default=None)
        if found is not None:
            self._free = [b for b in self._free if b is not found]
        if found is None or not fitting:
            found = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return found[:nbytes].view(dtype)

    def give(self, buffer: Tensor) -> None:
        """Nobody uses what `take` lent any more."""
        if self.keep:
            whole = torch.empty(0, dtype=torch.uint8, device=buffer.device)
            self._free.append(whole.set_(buffer.untyped_storage()))
