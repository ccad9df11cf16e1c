"""Messages of a group, by its own ranks: who I am, what can be written to, post and wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
Message = tuple[Tensor, int]  # a tensor and the peer that it goes to or comes from


def place(group: Group = None) -> tuple[int, int]:
    """This process's rank in the group and the number of ranks; ValueError for an outsider."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group: only its members may call")
    return rank, n


@contextmanager
def flat(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor's elements in one dimension, to write to; copied back if that needs a copy."""
    buffer = tensor.detach().contiguous()
    yield buffer.view(-1)  # (numel,)
    if not tensor.is_contiguous():
        tensor.detach().copy_(buffer)


def post(sends: Sequence[Message], receives: Sequence[Message], group: Group) -> list[dist.Work]:
    """Start all sends and receives at once: wait for each work before its tensor is touched.

    Nobody waits before everything is posted, so no order of the ranks can make them wait in a ring.
    """
    ops = [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for t, peer in receives]
    ops += [dist.P2POp(dist.isend, t, group=group, group_peer=peer) for t, peer in sends]
    # Of a pair the lower rank sends first: NCCL does unbatched messages of a pair one by one.
    rank = dist.get_rank(group)
    ops.sort(key=lambda op: (op.op is dist.isend) == (op.group_peer < rank))
    return dist.batch_isend_irecv(ops) if ops else []


def wait(works: Sequence[dist.Work]) -> None:
    """Return when all works are done."""
    for work in works:
        work.wait()
