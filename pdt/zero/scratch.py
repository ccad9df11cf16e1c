"""Buffers that are used again: fresh memory costs as much time as what is to be moved through it.

The system hands out memory by pages, at the first touch of each, and takes large blocks back when
they are freed; so a bucket that is allocated anew in every step pays for its pages every time.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Flat buffers of one owner: `take` lends one, `give` returns it for the next taker.

    It keeps as many as were ever lent at the same time, and none that has become too small.
    """

    def __init__(self) -> None:
        self.free: list[Tensor] = []  # of bytes

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised 1-D tensor of `numel` elements, in the smallest buffer that fits."""
        nbytes = numel * dtype.itemsize
        here = [b for b in self.free if b.device == device]
        fitting = [b for b in here if b.numel() >= nbytes]
        found = min(fitting or here, key=Tensor.numel, default=None)
        if found is not None:
            self.free = [b for b in self.free if b is not found]
        if found is None or not fitting:
            found = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return found[:nbytes].view(dtype)

    def give(self, buffer: Tensor) -> None:
        """Nobody uses what `take` lent any more."""
        whole = torch.empty(0, dtype=torch.uint8, device=buffer.device)
        self.free.append(whole.set_(buffer.untyped_storage()))
