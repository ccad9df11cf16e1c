"""What a bucket sends: its gradients, or something smaller from which the sum is rebuilt.

A hook is a generator function. DDP calls it when a bucket is full; it begins its communication and
yields the work, which DDP waits for at the end of backward; then the hook goes on, to another yield
or to its end, when `bucket.flat` must hold the sum over ranks. Rounds of several buckets alternate
in the same order on all ranks. (torch's hooks are functions that return a future.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(eq=False)
class GradBucket:
    """One bucket's gradients on this rank, already divided by the number of ranks.

    `flat` is the 1-D buffer, `views` its parts, shaped like the parameters. `is_last` is true of
    the bucket that is sent last.
    """

    index: int
    flat: Tensor
    views: list[Tensor]
    is_last: bool


Rounds = Iterator[Any]  # of works: what is yielded has wait()
Hook = Callable[[GradBucket, dist.ProcessGroup | None], Rounds]


def all_reduce_hook(bucket: GradBucket, group: dist.ProcessGroup | None) -> Rounds:
    """The gradients as they are: the default."""
    yield dist.all_reduce(bucket.flat, group=group, async_op=True)


def noop_hook(bucket: GradBucket, group: dist.ProcessGroup | None) -> Rounds:
    """Nothing: the step that free communication would give. The gradients are wrong."""
    return
    yield


def bf16_hook(bucket: GradBucket, group: dist.ProcessGroup | None) -> Rounds:
    """Half the bytes of fp32, its range, 8 bits of precision; the sum is rounded at each hop."""
    return _cast(bucket, group, torch.bfloat16)


def fp16_hook(bucket: GradBucket, group: dist.ProcessGroup | None) -> Rounds:
    """Half the bytes of fp32 and 11 bits of precision, for magnitudes of 6e-8 to 65504.

    What travels is divided by the number of ranks already, so no sum exceeds what a mean may be.
    """
    return _cast(bucket, group, torch.float16)


def fp32_sum_hook(bucket: GradBucket, group: dist.ProcessGroup | None) -> Rounds:
    """bf16 on the wire, sums in fp32: as many bytes as a bf16 all-reduce, one rounding of the sum.

    Rank r gets everybody's part r (all-to-all), adds in fp32, and hands the sum, rounded once, to
    all (all-gather). Parts are of one length, so up to n-1 zeros travel besides. Megatron-LM's
    fp32 accumulation in a reduce-scatter does the same.
    """
    n, flat = dist.get_world_size(group), as_real(bucket.flat)
    part_numel = -(-flat.numel() // n)
    sent = flat.new_zeros(n * part_numel, dtype=torch.bfloat16)
    sent[: flat.numel()] = flat
    received = torch.empty_like(sent)
    yield dist.all_to_all_single(received, sent, group=group, async_op=True)
    total = received.view(n, part_numel).sum(0, dtype=torch.float32).bfloat16()
    yield dist.all_gather(list(sent.chunk(n)), total, group=group, async_op=True)
    flat.copy_(sent[: flat.numel()])


def as_real(flat: Tensor) -> Tensor:
    """The same memory as real numbers, two for a complex one: a cast would drop the imaginary."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _cast(bucket: GradBucket, group: dist.ProcessGroup | None, dtype: torch.dtype) -> Rounds:
    flat = as_real(bucket.flat)
    small = flat.to(dtype)
    yield dist.all_reduce(small, group=group, async_op=True)
    flat.copy_(small)
