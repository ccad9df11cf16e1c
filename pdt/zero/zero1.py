"""Stage 1: each rank holds the optimizer's states of one shard, 1/n, and updates that alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from pdt.comm.norm import clip_over_ranks
from pdt.zero.agree import any_rank, highest_of_ranks
from pdt.zero.bucket import StartedReduce, fill, must_scale_before
from pdt.zero.checks import check_in_place, check_unchanged, version
from pdt.zero.sharded import ShardedOptimizer

IN_FLIGHT = 2  # buckets that are reduced at the same time: one arrives while another is filled
ASKS = 2  # above any flag: this rank has something to take in first


class Zero1(ShardedOptimizer):
    """An optimizer of `optimizer_class` whose states are sharded: each rank holds 1/n of them.

    It averages the gradients itself (the model is not wrapped in DDP): after `loss.backward()` on
    every rank, `step()` reduces each bucket of gradients so that a rank gets the mean of its shard,
    updates that shard, and gathers the parameters. Afterwards every rank holds all of them, the
    same. A step sends 2(n-1)/n of the parameters' bytes, as an all-reduce of the gradients would,
    and by one byte a parameter the ranks agree which have a gradient: what has none on some ranks
    counts as zero there, what has none anywhere is left alone.

    `params` as in torch: parameters, pairs with names, or groups; their values are rank 0's
    afterwards, also of those that are frozen. `optimizer_class` is any elementwise optimizer and
    `defaults` are its arguments; parameter groups and learning-rate schedules work as on it.
    `bucket_cap_mb` is in MiB. With `master_dtype` the optimizer works on a copy of its shard in
    that dtype (torch.float32 for bf16 parameters). The parameters' memory becomes part of flat
    buffers; their strides stay. A parameter that is listed twice counts once; one that does not
    require a gradient has no state and no traffic in a step until it does. `keep_buffers` keeps the
    buffers in which buckets are reduced from step to step, those of two or three buckets: on a CPU,
    which pays for fresh memory page by page, a step is then faster.

    Raises ValueError, the same on every rank, when the ranks' parameters, groups or arguments
    differ; and for an optimizer that is not elementwise, and for two parameters in the same memory.

    Rajbhandari et al. 2020, section 5.1 (arXiv:1910.02054); torch's is ZeroRedundancyOptimizer.
    """

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce, update, gather; while one bucket is updated, others are on their way."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_in_place(self.names, self.buckets)
        gathers = []
        for index, used in self._reduced():
            self.updates[index].step(used, self._settings(self.buckets[index]))
            gathers.append(self.buckets[index].start_gather())
        for gather in gathers:
            gather.wait()
        updated = list(compress(self._known, self._used or []))
        torch.autograd.graph.increment_version(updated)  # a graph that saved them is not valid
        self._used = None
        self._after_step()
        return loss

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Each bucket's `shard_grad` holds the mean over ranks afterwards, and `step` uses it.

        For what must look at the means first, as clipping does. All ranks must call it.
        """
        for _ in self._reduced():
            pass
        self._versions = [version(param) for param in self._known]

    def _reduced(self) -> Iterator[tuple[int, list[bool]]]:
        """The buckets that have a gradient on some rank, as soon as the means are there: the index,
        and which of the bucket's parameters have one."""
        if self._used is not None:
            check_unchanged(self.names, self._known, self._versions)
            used, remaining = self._used, set[int]()
        else:
            used, remaining = self._choose(self._agree())
        uses = [[used[position] for position in bucket.positions] for bucket in self.buckets]
        order = [index for index, flags in enumerate(uses) if any(flags)]
        waiting = deque(index for index in order if index in remaining)
        in_flight: dict[int, StartedReduce] = {}
        for index in order:
            while waiting and len(in_flight) < IN_FLIGHT:
                following = waiting.popleft()
                in_flight[following] = self._start_reduce(following)
            if index in in_flight:
                in_flight.pop(index).wait()
            yield index, uses[index]
        self._used = used

    def _agree(self) -> list[list[bool]]:
        """The flags of `_flags`, each set if it is on some rank. When a rank has unfrozen
        something, all take it in first."""
        asks = bool(self._new())
        own: list[list[int]] = [
            [ASKS if asks else int(flag) for flag in row] for row in self._flags()
        ]
        levels = highest_of_ranks(own, self.group, self._device)
        if ASKS in levels[0]:
            self._take_in()
            return any_rank(self._flags(), self.group, self._device)
        return [[level > 0 for level in row] for row in levels]

    def _flags(self) -> list[list[bool]]:
        """Which parameters have a gradient here."""
        self._forget_means()
        return [[param.grad is not None for param in self._known] or [False]]

    def _choose(self, flags: list[list[bool]]) -> tuple[list[bool], set[int]]:
        """Which parameters have a gradient on some rank, and which buckets are to be reduced."""
        return flags[0], set(range(len(self.buckets)))

    def _start_reduce(self, index: int) -> StartedReduce:
        bucket = self.buckets[index]
        flat_grad = bucket.new_flat()
        before = must_scale_before(flat_grad.dtype)
        factor = 1 / self.world_size if before else 1.0
        fill(bucket.grad_views(flat_grad), [param.grad for param in bucket.params], factor)
        return bucket.start_reduce(flat_grad, scaled=before)

    def _after_step(self) -> None:
        """The next step reduces what `.grad` holds then."""
        self._forget_means()

    def _forget_means(self) -> None:
        for bucket in self.buckets:
            bucket.shard_grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        super().zero_grad(set_to_none)
        self._used = None
        self._forget_means()

    @torch.no_grad()
    def mean_grads(self) -> list[Tensor]:
        """This rank's shards of the mean gradients, reduced if they are not, a tensor a bucket that
        has one, in the master dtype if there is one. `step` uses what is written to them.

        All ranks must call it.
        """
        self.reduce_gradients()
        for bucket in self.buckets:
            if bucket.shard_grad is not None:
                bucket.shard_grad = bucket.shard_grad.to(bucket.sum_dtype)
        return [bucket.shard_grad for bucket in self.buckets if bucket.shard_grad is not None]

    # The gradients' norm

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """As torch's, of the means over ranks: every rank gets the norm of the whole gradient.

        Reduces the gradients, so it stands behind the last backward. `.grad` stays as it is.
        """
        self.reduce_gradients()
        means = [bucket.shard_grad for bucket in self.buckets if bucket.shard_grad is not None]
        return clip_over_ranks(
            means,
            max_norm,
            norm_type,
            self.group,
            device=self._device,
            error_if_nonfinite=error_if_nonfinite,
        )
