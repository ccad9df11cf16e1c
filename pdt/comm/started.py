"""All-gather and reduce-scatter that run while the caller computes, the fast way on each backend.

Both work on a flat tensor of n equal shards, `whole`, of which shard r belongs to rank r. gloo's
all-gather fills a buffer of its own at each call, and its reduce-scatter all-reduces a clone; there
everybody sends to everybody instead (see `pdt.comm.collectives`), and what arrives lands in its
place. NCCL, shared memory, and gloo with tensors on a GPU make torch's calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pdt.comm.collectives import sum_in_order
from pdt.comm.messages import Group, place, post, wait

# torch is renaming these two
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Started:
    """A collective under way: `wait()` returns when its result is there, also when asked again.

    Its tensors are held, and must not be touched, until then.
    """

    def __init__(
        self, works: Sequence[Any], tensors: Sequence[Tensor], finish: Callable[[], object]
    ) -> None:
        self._works, self._tensors, self._finish = works, tensors, finish

    def wait(self) -> None:
        works, self._works = self._works, ()
        if works:
            wait(works)
            self._finish()
        self._tensors, self._finish = (), _nothing


def _nothing() -> None:
    pass


def start_all_gather(whole: Tensor, group: Group = None) -> Started:
    """Every rank's `whole` will hold all shards; each has put its own in place before the call.

    A rank sends (n-1)/n of `whole`.
    """
    rank, n = place(group)
    if n == 1 or whole.numel() == 0:
        return Started((), (), _nothing)
    shards = whole.chunk(n)
    if sends_messages(whole, group):
        peers = [(rank + k) % n for k in range(1, n)]
        sends = [(shards[rank], peer) for peer in peers]
        works: Sequence[Any] = post(sends, [(shards[peer], peer) for peer in peers], group)
    else:
        works = [_all_gather(whole, shards[rank], group=group, async_op=True)]
    return Started(works, (whole,), _nothing)


def start_reduce_scatter(
    shard: Tensor, whole: Tensor, group: Group = None, *, inbox: Tensor | None = None
) -> Started:
    """Rank r's `shard` will hold the sum of all ranks' shard r of `whole`.

    A rank sends (n-1)/n of `whole`. By messages, the sum runs in the order of the ranks for every
    element, and fp16 and bf16 are summed in fp32 and rounded once, so a result does not depend on
    which elements travel together. The others' terms wait in `inbox`, n-1 shards that nobody
    touches meanwhile, made here if it is not given.
    """
    rank, n = place(group)
    if n == 1 or whole.numel() == 0:
        shard.copy_(whole)
        return Started((), (), _nothing)
    if not sends_messages(whole, group):
        work = _reduce_scatter(shard, whole, group=group, async_op=True)
        return Started([work], (shard, whole), _nothing)
    parts = whole.chunk(n)
    boxes = (whole.new_empty((n - 1) * shard.numel()) if inbox is None else inbox).chunk(n - 1)
    peers = [(rank + k) % n for k in range(1, n)]
    terms = {rank: parts[rank], **dict(zip(peers, boxes, strict=True))}
    works = post(
        [(parts[peer], peer) for peer in peers], [(terms[peer], peer) for peer in peers], group
    )
    in_order = [terms[r] for r in range(n)]
    return Started(works, (shard, whole, *boxes), lambda: sum_in_order(in_order, shard))


def sends_messages(tensor: Tensor, group: Group) -> bool:
    """Whether these collectives are made of messages for this tensor; a reduction needs an `inbox`
    only then."""
    return dist.get_backend(group).endswith("gloo") and tensor.device.type == "cpu"
