"""Parameters that are reduced, updated and gathered together, and this rank's shard of them.

Words: a bucket's *flat* buffer holds its parameters one behind the other, padded to n equal
*shards*; shard r belongs to rank r. The model's parameters become views into `flat`, so an
all-gather writes into the model itself. Gradients of the same layout are reduced into `shard_grad`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdt.comm.started import Started, sends_messages, start_all_gather, start_reduce_scatter
from pdt.flat import ShardLayout, unflatten
from pdt.zero.scratch import Scratch


class ShardedBucket:
    """`flat` and the place of each parameter in it; this rank's `shard` is a part of `flat`.

    `positions` are the parameters' numbers in the optimizer, `group_index` their parameter group.
    `shard_grad`: the mean over ranks of the gradients of this rank's shard, once it is reduced;
    several of them are added in `sum_dtype`, by default that of the parameters.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        positions: Sequence[int],
        group_index: int,
        group: dist.ProcessGroup | None,
        sum_dtype: torch.dtype | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        self.scratch = scratch or Scratch(keep=False)
        self.params, self.positions, self.group_index = list(params), list(positions), group_index
        self.sum_dtype = sum_dtype or params[0].dtype
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.layout = ShardLayout(tuple(p.numel() for p in params), self.world_size)
        self.pieces = self.layout.pieces(self.rank)
        self._are_contiguous = [p.is_contiguous() for p in self.params]
        self._viewed: tuple[int, list[Tensor]] | None = None  # an address, and the views of there
        self.flat = torch.zeros(
            self.layout.padded_numel, dtype=params[0].dtype, device=params[0].device
        )
        for param, view in zip(params, self.views(self.flat), strict=True):
            view.copy_(param.detach())
            param.data = view
        self._addresses = [p.data_ptr() for p in self.params]
        self.shard_grad: Tensor | None = None

    @property
    def shard(self) -> Tensor:
        return self.flat.chunk(self.world_size)[self.rank] if self.flat.numel() else self.flat

    def moved(self) -> list[int]:
        """Indices of the parameters that are no longer views into `flat`."""
        addresses = [p.data_ptr() for p in self.params]
        if addresses == self._addresses:
            return []
        places = zip(self.params, addresses, self._addresses, strict=True)
        return [i for i, (p, now, before) in enumerate(places) if now != before and p.numel()]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a tensor of this bucket's layout, one shaped like each parameter."""
        used = flat[: self.layout.offsets[-1]]
        if not all(self._are_contiguous):
            return unflatten(used, self.params)
        parts = used.split(self.layout.numels)  # one call for all, where strides say no more
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

    def grad_views(self, flat_grad: Tensor) -> list[Tensor]:
        """`views` of a tensor of `new_flat`: of a buffer that is kept, they are made once."""
        address = flat_grad.data_ptr()  # no other buffer can be there while its views live
        if self._viewed is not None and self._viewed[0] == address:
            return self._viewed[1]
        views = self.views(flat_grad)
        if self.scratch.keep:
            self._viewed = address, views
        return views

    def new_flat(self) -> Tensor:
        """An uninitialised tensor of this bucket's layout, but for its padding, which is zero."""
        flat = self._take(self.layout.padded_numel)
        flat[self.layout.offsets[-1] :].zero_()
        return flat

    def start_reduce(self, flat_grad: Tensor, *, scaled: bool) -> StartedReduce:
        """Begin to reduce gradients of this bucket's layout; see `StartedReduce.wait`.

        `flat_grad` is of `new_flat`, and given up; `scaled`: divided by the number of ranks.
        """
        shard, inbox = torch.empty_like(self.shard), None
        if sends_messages(flat_grad, self.group):
            inbox = self._take((self.world_size - 1) * self.layout.shard_numel)
        started = start_reduce_scatter(shard, flat_grad, self.group, inbox=inbox)
        return StartedReduce(self, shard, started, scaled, [flat_grad, inbox])

    def _take(self, numel: int) -> Tensor:
        return self.scratch.take(numel, self.flat.dtype, self.flat.device)

    def start_gather(self) -> Started:
        """Begin to write all ranks' shards into the model's parameters."""
        return start_all_gather(self.flat, self.group)


class StartedReduce:
    """A reduce-scatter under way; its result is added to the bucket's `shard_grad` by `wait`."""

    def __init__(
        self,
        bucket: ShardedBucket,
        shard: Tensor,
        started: Started,
        scaled: bool,
        lent: Sequence[Tensor | None],
    ) -> None:
        self._bucket, self._shard, self._started, self._scaled = bucket, shard, started, scaled
        self._lent = lent

    def wait(self) -> ShardedBucket:
        """Returns the bucket, whose `shard_grad` holds the mean, or what was there and the mean."""
        self._started.wait()
        bucket, lent, self._lent = self._bucket, self._lent, ()
        mean = self._shard if self._scaled else self._shard.div_(bucket.world_size)
        before = bucket.shard_grad
        bucket.shard_grad = mean if before is None else before.to(bucket.sum_dtype).add_(mean)
        for buffer in lent:
            if buffer is not None:
                bucket.scratch.give(buffer)
        return bucket


def must_scale_before(dtype: torch.dtype) -> bool:
    """Whether a sum over ranks could overflow where their mean does not: divide before, then.

    Else the shard is divided, which is n times less work.
    """
    return dtype == torch.float16


def fill(views: Sequence[Tensor], grads: Sequence[Tensor | None], factor: float) -> None:
    """Put gradients, times `factor`, into their places; what has none counts as zero."""
    places, dense = [], []
    for view, grad in zip(views, grads, strict=True):
        if grad is None:
            view.zero_()
        elif grad.is_sparse:
            view.zero_().add_(grad.detach())
        else:
            places.append(view)
            dense.append(grad.detach() if grad.requires_grad else grad)
    if places:
        torch._foreach_copy_(places, dense)
    if factor != 1:
        torch._foreach_mul_(list(views), factor)
