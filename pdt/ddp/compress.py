"""Compression with error feedback: what a step does not send is kept, and added to the next one.

So nothing is lost, only late: after any number of steps, what all ranks have applied and what they
still keep add up to the sum of all gradients. Both hooks keep that rest by bucket, on each rank by
itself; use one object for one DDP. When buckets are laid out anew (a parameter was frozen) the
rest is dropped. A gradient that is not finite reaches every rank and is not kept.

Stich et al. 2018 (arXiv:1809.07599), Karimireddy et al. 2019 (arXiv:1901.09847).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pdt.ddp.hooks import GradBucket, Rounds, all_reduce_hook, as_real
from pdt.flat import flatten, unflatten


class TopK:
    """Each rank sends its largest gradients, k = `fraction` of each bucket, with their positions.

    Afterwards every rank holds the sum of what was sent, zero elsewhere. One all-gather: a rank
    sends (n-1) k (4 + itemsize) bytes, an index of 4 bytes with each value. That is less than an
    all-reduce of fp32 only while `fraction` is below 1/n: ranks choose different positions, so
    there is no sum to be made on the way. Complex gradients count as two numbers.

    Aji and Heafield 2017 (arXiv:1704.05021). Raises ValueError unless 0 < fraction <= 1.
    """

    def __init__(self, fraction: float, *, error_feedback: bool = True) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, got {fraction}")
        self.fraction, self.error_feedback = fraction, error_feedback
        self._kept: dict[int, tuple[list[torch.Size], Tensor]] = {}

    def k(self, numel: int) -> int:
        """How many of a bucket's `numel` gradients each rank sends."""
        return min(numel, math.ceil(self.fraction * numel))

    def __call__(self, bucket: GradBucket, group: dist.ProcessGroup | None) -> Rounds:
        n, flat, shapes = dist.get_world_size(group), as_real(bucket.flat), _shapes(bucket)
        whole = flat.to(_wide(flat.dtype))  # a rest that grows would stick in 16 bits
        if bucket.index in self._kept and self._kept[bucket.index][0] == shapes:
            whole = whole + self._kept[bucket.index][1]
        indices = whole.abs().topk(self.k(flat.numel()), sorted=False).indices
        values = whole[indices].to(flat.dtype)
        sent = torch.cat([indices.int().view(torch.uint8), values.view(torch.uint8)])
        received = [torch.empty_like(sent) for _ in range(n)]
        yield dist.all_gather(received, sent, group=group, async_op=True)
        if self.error_feedback:
            rest = whole.index_add(0, indices, values.to(whole.dtype), alpha=-1)
            self._kept[bucket.index] = shapes, _finite(rest)
        flat.zero_()
        for part in received:  # one rank after the other: the same sum on all, to the bit
            where, what = part[: 4 * len(indices)], part[4 * len(indices) :]
            flat.index_add_(0, _as(where, torch.int32), _as(what, flat.dtype))


@dataclass
class _LowRank:
    """One bucket's warm start and rest: for each matrix (n, m) a `q` (m, r) and an `error` (n, m).

    `large` are the positions of the matrices among the bucket's parameters, `small` the others;
    `starts` is what the `qs` were at first.
    """

    shapes: list[torch.Size]
    large: list[int]
    small: list[int]
    starts: list[Tensor]
    qs: list[Tensor]
    errors: list[Tensor]


class PowerSGD:
    """Sends each gradient matrix (n, m) as P Q^T, with P (n, r), Q (m, r) and r = min(rank, n, m).

    Afterwards every rank holds the sum over ranks of P Q^T, where P is an orthonormal basis of one
    power iteration's range, started from the last step's Q. A tensor of more dimensions is a matrix
    with its first as rows. What would not shrink by more than `min_compression` (vectors, small
    matrices) travels as it is. Two all-reduces a bucket, the first of all P and of what is not
    compressed, the second of all Q: (small + sum of r (n + m)) numbers together. In fp32, also
    where gradients have 16 bits; a bucket of complex numbers is not compressed.

    Vogels et al. 2019, algorithms 1 and 2 (arXiv:1905.13727); each rank's error is that of its own
    matrix. Raises ValueError unless rank is 1 or more.
    """

    def __init__(
        self,
        rank: int,
        *,
        min_compression: float = 2.0,
        error_feedback: bool = True,
        seed: int = 0,
    ) -> None:
        if rank < 1:
            raise ValueError(f"rank must be 1 or more, got {rank}")
        self.rank, self.min_compression = rank, min_compression
        self.error_feedback, self.seed = error_feedback, seed
        self._kept: dict[int, _LowRank] = {}

    def rank_of(self, shape: Sequence[int]) -> int:
        """The rank at which a tensor of this shape travels; 0 if it travels as it is."""
        if len(shape) < 2:
            return 0
        n, m = shape[0], math.prod(shape[1:])
        rank = min(self.rank, n, m)
        return rank if rank * (n + m) * self.min_compression < n * m else 0

    def __call__(self, bucket: GradBucket, group: dist.ProcessGroup | None) -> Rounds:
        if bucket.flat.is_complex():
            yield from all_reduce_hook(bucket, group)
            return
        kept, dtype = self._state(bucket), _wide(bucket.flat.dtype)
        small, large = ([bucket.views[i] for i in each] for each in (kept.small, kept.large))
        matrices = [
            view.flatten(1).to(dtype) + error
            for view, error in zip(large, kept.errors, strict=True)
        ]  # (n, m)
        ps = [matrix @ q for matrix, q in zip(matrices, kept.qs, strict=True)]  # (n, r)
        sent = flatten([*(view.to(dtype) for view in small), *ps])
        yield dist.all_reduce(sent, group=group, async_op=True)
        sums = unflatten(sent, [*small, *ps])
        for view, total in zip(small, sums, strict=False):
            view.copy_(total)
        if not large:
            return

        ps = [torch.linalg.qr(p).Q for p in sums[len(small) :]]
        own_qs = [matrix.T @ p for matrix, p in zip(matrices, ps, strict=True)]  # (m, r)
        sent = flatten(own_qs)
        work = dist.all_reduce(sent, group=group, async_op=True)
        parts = zip(matrices, ps, own_qs, strict=True)
        errors = [_finite(matrix - p @ q.T) for matrix, p, q in parts]
        yield work
        qs = unflatten(sent, own_qs)
        for view, p, q in zip(large, ps, qs, strict=True):
            view.copy_((p @ q.T).view(view.shape))
        kept.qs = [_restarted(q, start) for q, start in zip(qs, kept.starts, strict=True)]
        if self.error_feedback:
            kept.errors = errors

    def _state(self, bucket: GradBucket) -> _LowRank:
        """What is kept of this bucket; at first, random Q that are the same on all ranks."""
        shapes = _shapes(bucket)
        kept = self._kept.get(bucket.index)
        if kept is None or kept.shapes != shapes:
            ranks = [self.rank_of(shape) for shape in shapes]
            large = [i for i, rank in enumerate(ranks) if rank]
            small = [i for i, rank in enumerate(ranks) if not rank]
            matrices = [bucket.views[i].flatten(1).to(_wide(bucket.flat.dtype)) for i in large]
            generator = torch.Generator().manual_seed(self.seed + bucket.index)
            starts = [
                torch.randn(matrix.shape[1], ranks[i], generator=generator).to(matrix)
                for i, matrix in zip(large, matrices, strict=True)
            ]
            errors = [torch.zeros_like(matrix) for matrix in matrices]
            kept = self._kept[bucket.index] = _LowRank(shapes, large, small, starts, starts, errors)
        return kept


def _shapes(bucket: GradBucket) -> list[torch.Size]:
    return [view.shape for view in bucket.views]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """At least fp32."""
    return torch.promote_types(dtype, torch.float32)


def _as(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes from the wire as numbers; a copy, since they may begin anywhere."""
    return part.clone().view(dtype)


def _finite(rest: Tensor) -> Tensor:
    """Without what would never leave again: an overflow that a loss scaler has skipped."""
    return rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _restarted(q: Tensor, start: Tensor) -> Tensor:
    """`q` with a random column for each that leads nowhere: of a step without gradients, or NaN."""
    leads = q.isfinite().all(0) & q.ne(0).any(0)
    return torch.where(leads, q, start)
