"""Gradients on their way to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdt.offload.bus import Bus, Transfer
from pdt.offload.host_bucket import HostBucket
from pdt.offload.host_buffers import HostBuffers

UNDER_WAY = 2  # transfers at once during backward: one on the bus, one that waits for it


@dataclass
class Arrival:
    """Gradients of `params` under way, to their place or, where they are to be added, `inbox`."""

    bucket: HostBucket
    transfer: Transfer
    params: Sequence[int]
    fresh: set[int]  # of those, the first since the last step
    inbox: Tensor | None  # bytes
    dtype: torch.dtype


class Arrivals:
    """Sends the gradients of buckets, and adds up what comes by several backwards.

    A gradient leaves its parameter at once, and its memory when it has been carried.
    """

    def __init__(self, bus: Bus, buffers: HostBuffers) -> None:
        self._bus, self._buffers = bus, buffers  # of these come the inboxes
        self._under_way: deque[Arrival] = deque()

    def send(self, bucket: HostBucket) -> None:
        """All of a bucket, which are complete; waits while the bus is behind."""
        while len(self._under_way) >= UNDER_WAY:
            self._settle_oldest()
        self._start(bucket, range(len(bucket.params)))

    def send_rest(self, bucket: HostBucket) -> None:
        """What is left after the last backward. RuntimeError when it left before."""
        params = [i for i, param in enumerate(bucket.params) if param.grad is not None]
        for i in params:
            if i in bucket.came and i not in bucket.ready:
                raise RuntimeError(written_by_others(bucket.names[i]))
        if params:
            self._start(bucket, params)

    def settle(self, bucket: HostBucket) -> None:
        """All that has been sent of this bucket is in its place."""
        while any(arrival.bucket is bucket for arrival in self._under_way):
            self._settle_oldest()

    def settle_all(self) -> None:
        while self._under_way:
            self._settle_oldest()

    def _start(self, bucket: HostBucket, params: Sequence[int]) -> None:
        grads = [_take_grad(bucket, i) for i in params]
        bucket.ready.difference_update(params)
        fresh = set(params) - bucket.came
        dtype = grads[0].dtype
        is_direct = len(fresh) == len(params) and dtype == bucket.flat_grads.dtype
        inbox = None if is_direct else self._buffers.take(bucket.numel * dtype.itemsize)
        views = bucket.views(bucket.flat_grads if inbox is None else inbox.view(dtype))
        pairs = [(grad, views[i]) for grad, i in zip(grads, params, strict=True)]
        transfer = self._bus.to_host(pairs, "gradients")
        bucket.came.update(params)
        self._under_way.append(Arrival(bucket, transfer, params, fresh, inbox, dtype))

    @torch.no_grad()
    def _settle_oldest(self) -> None:
        arrival = self._under_way[0]
        arrival.transfer.wait()
        self._under_way.popleft()
        if arrival.inbox is None:
            return
        bucket = arrival.bucket
        bucket.widen_grads()
        grads = bucket.views(bucket.flat_grads)
        came = bucket.views(arrival.inbox.view(arrival.dtype))
        for i in arrival.params:
            if i in arrival.fresh:
                grads[i].copy_(came[i])
            else:
                grads[i].add_(came[i])
        self._buffers.give(arrival.inbox)


def written_by_others(name: str) -> str:
    """What to say when a gradient that leaves during backward has another owner besides."""
    return (
        f"the gradient of {name} leaves for the host during backward, and somebody else has taken "
        "or written it besides (DistributedDataParallel?): make the optimizer with "
        "during_backward=False"
    )


def _take_grad(bucket: HostBucket, i: int) -> Tensor:
    grad, name = bucket.params[i].grad, bucket.names[i]
    assert grad is not None
    if grad.layout != torch.strided:
        raise ValueError(f"the gradient of {name} is sparse: it has no place in a flat buffer")
    if grad.requires_grad:
        raise RuntimeError(
            f"the gradient of {name} has a graph of its own (create_graph=True), which moving it "
            "to the host would cut off"
        )
    bucket.params[i].grad = None
    return grad
