"""What each call of a process group carries: the operation, the tensors that count, the peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Payload:
    """`tensors` count `times` over; `peer` is a group rank; `result` is what a future holds."""

    op: str
    tensors: list[torch.Tensor]
    result: Any = None
    peer: int | None = None
    times: int = 1

    @property
    def is_collective(self) -> bool:
        return self.op not in ("send", "recv")

    @property
    def nbytes(self) -> int:
        return self.times * sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the one tensor, or the element counts of several."""
        if len(self.tensors) == 1:
            return tuple(self.tensors[0].shape)
        return tuple(t.numel() for t in self.tensors)

    @property
    def dtype(self) -> str:
        return str(self.tensors[0].dtype).removeprefix("torch.") if self.tensors else ""


def flatten(nested: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tensor, or of lists of them to any depth."""
    if isinstance(nested, torch.Tensor):
        yield nested
    else:
        for item in nested:
            yield from flatten(item)


Reader = Callable[[int, tuple], Payload]  # (group size, positional arguments) -> payload


def _argument(op: str, index: int, *, rooted: bool = False) -> Reader:
    """The payload is argument `index`; outputs come first in every method that has both."""

    def read(size: int, args: tuple) -> Payload:
        peer = args[-1].rootRank if rooted and hasattr(args[-1], "rootRank") else None
        return Payload(op, list(flatten(args[index])), args[0], peer)

    return read


def _pieces(op: str, index: int) -> Reader:
    """Each rank passes one of the n pieces that the root has or gets."""

    def read(size: int, args: tuple) -> Payload:
        peer = getattr(args[-1], "rootRank", None)
        return Payload(op, list(flatten(args[index])), args[0], peer, times=size)

    return read


def _message(op: str) -> Reader:
    return lambda size, args: Payload(op, list(flatten(args[0])), args[0], args[1])


READERS: dict[str, Reader] = {
    "allreduce": _argument("all_reduce", 0),
    "allreduce_coalesced": _argument("all_reduce", 0),
    "allgather": _argument("all_gather", 0),
    "allgather_coalesced": _argument("all_gather", 0),
    "_allgather_base": _argument("all_gather", 0),
    "all_gather_single": _argument("all_gather", 0),
    "allgather_into_tensor_coalesced": _argument("all_gather", 0),
    "all_gather_single_coalesced": _argument("all_gather", 0),
    "reduce_scatter": _argument("reduce_scatter", 1),
    "_reduce_scatter_base": _argument("reduce_scatter", 1),
    "reduce_scatter_single": _argument("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": _argument("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": _argument("reduce_scatter", 1),
    "alltoall": _argument("all_to_all", 1),
    "alltoall_base": _argument("all_to_all", 1),
    "all_to_all_single": _argument("all_to_all", 1),
    "broadcast": _argument("broadcast", 0, rooted=True),
    "reduce": _argument("reduce", 0, rooted=True),
    "gather": _pieces("gather", 1),
    "scatter": _pieces("scatter", 0),
    "send": _message("send"),
    "recv": _message("recv"),
    "recv_anysource": lambda size, args: Payload("recv", list(flatten(args[0])), args[0]),
    "barrier": lambda size, args: Payload("barrier", []),
}
