"""What lies in files and is used a piece at a time, and the notes of when each piece was where.

Words: an *item* is what is used at a time, such as one bucket's states; it has *planes* of equal
length (masters and the two moments of Adam). A *buffer* is memory of the host for any one item.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pdt.measure.timeline import Span

READ, USE, WRITE, STALL = "read", "use", "write", "stall"
_ALIGN_NUMEL = 64  # no vector of any dtype is wider, so that each plane begins where one may
_LANES = {READ: "read", USE: "host", WRITE: "write"}  # of a timeline


@dataclass(frozen=True)
class Item:
    """`planes` by name, each 1-D (numel,) of `dtype`."""

    numel: int
    planes: tuple[str, ...] = ("master", "exp_avg", "exp_avg_sq")
    dtype: torch.dtype = torch.float32

    @property
    def stride(self) -> int:
        """Elements from the beginning of a plane to that of the next."""
        return -(-self.numel // _ALIGN_NUMEL) * _ALIGN_NUMEL

    @property
    def nbytes(self) -> int:
        return len(self.planes) * self.stride * self.dtype.itemsize

    def whole(self, buffer: Tensor) -> Tensor:
        """All planes in the bytes of a buffer, with what lies between: (planes, stride)."""
        return buffer[: self.nbytes].view(self.dtype).view(len(self.planes), self.stride)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Each plane (numel,) in the bytes of a buffer."""
        rows = self.whole(buffer)[:, : self.numel].unbind()
        return dict(zip(self.planes, rows, strict=True))

    @torch.no_grad()
    def fill(self, buffer: Tensor, planes: Mapping[str, Tensor]) -> None:
        """Copy `planes`, of any shape with this numel, into a buffer; ValueError for others."""
        if set(planes) != set(self.planes):
            raise ValueError(f"the planes are {self.planes}, got {tuple(planes)}")
        if wrong := {n: t.numel() for n, t in planes.items() if t.numel() != self.numel}:
            raise ValueError(f"a plane has {self.numel} elements, got {wrong}")
        self.whole(buffer).zero_()
        for name, view in self.views(buffer).items():
            view.copy_(planes[name].reshape(-1))


@dataclass(frozen=True, order=True)
class Event:
    """From `start_s` to `end_s` an item was "read", "use"d, "write"n, or waited for ("stall")."""

    start_s: float
    end_s: float
    what: str
    name: str
    buffer: int
    nbytes: int


def spans(events: Iterable[Event], rank: int) -> list[Span]:
    """For a `Timeline`: reads, writes and uses, which are in the lane of the host."""
    return [
        Span(e.name, e.start_s, e.end_s, _LANES[e.what], e.what, rank, e.nbytes)
        for e in events
        if e.what in _LANES
    ]
