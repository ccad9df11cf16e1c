"""Units of lesson 11's exercises: a matrix whose storage is there only from begin() to free()."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pdt.comm.started import Started, start_all_gather
from pdt.flat import ShardLayout


class GatheredUnit:
    """A matrix (width, width) in float64, of which this rank holds a shard.

    `begin()` makes room and starts the gather, `wait()` ends it, `free()` gives the room back;
    `begun` says whether there is room. Each call is noted in `events` as (what, index).
    """

    def __init__(self, index: int, matrix: Tensor, events: list[tuple[str, int]]) -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        self.index, self.width, self._events = index, matrix.shape[0], events
        self.layout = ShardLayout((matrix.numel(),), n)
        self.whole = torch.zeros(self.layout.padded_numel, dtype=matrix.dtype)
        self.whole[: matrix.numel()] = matrix.flatten()
        self._own = slice(rank * self.layout.shard_numel, (rank + 1) * self.layout.shard_numel)
        self.shard = self.whole[self._own].clone()
        self._started: Started | None = None
        self.ready = False
        self.whole.untyped_storage().resize_(0)

    @property
    def begun(self) -> bool:
        return self._started is not None

    @property
    def matrix(self) -> Tensor:
        return self.whole[: self.width**2].view(self.width, self.width)

    def begin(self) -> None:
        """RuntimeError when it has begun already."""
        self._events.append(("begin", self.index))
        if self.begun:
            raise RuntimeError(f"unit {self.index} is gathered already: look at its .begun")
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.whole[self._own] = self.shard
        self._started = start_all_gather(self.whole)

    def wait(self) -> None:
        """RuntimeError when there is nothing to wait for."""
        self._events.append(("wait", self.index))
        if self._started is None:
            raise RuntimeError(f"unit {self.index} has not begun: there is nothing to wait for")
        self._started.wait()
        self.ready = True

    def free(self) -> None:
        """Also of a unit that has nothing to free."""
        self._events.append(("free", self.index))
        if self._started is not None:
            self._started.wait()  # no transfer may write into memory that is gone
        self._started, self.ready = None, False
        self.whole.untyped_storage().resize_(0)


def held_nbytes(units: Sequence[GatheredUnit]) -> int:
    """Bytes of what is gathered just now."""
    return sum(unit.whole.untyped_storage().nbytes() for unit in units)
