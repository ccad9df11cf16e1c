"""Stage 1: each rank holds the optimizer's states of one shard, 1/n, and updates that alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdt.buckets import assign_buckets
from pdt.comm.replicate import broadcast, check_same
from pdt.zero import states
from pdt.zero.agree import any_rank
from pdt.zero.bucket import ShardedBucket, StartedReduce, fill, must_scale_before
from pdt.zero.checks import check_own_memory, describe, name_of
from pdt.zero.norm import check_finite, clip_factor, norm_over_ranks
from pdt.zero.update import ShardUpdate, check_elementwise

IN_FLIGHT = 2  # buckets that are reduced at the same time: one arrives while another is filled


class Zero1(torch.optim.Optimizer):
    """An optimizer of `optimizer_class` whose states are sharded: each rank holds 1/n of them.

    It averages the gradients itself (the model is not wrapped in DDP): after `loss.backward()` on
    every rank, `step()` reduces each bucket of gradients so that a rank gets the mean of its shard,
    updates that shard, and gathers the parameters. Afterwards every rank holds all of them, the
    same. A step sends 2(n-1)/n of the parameters' bytes, as an all-reduce of the gradients would,
    and by one byte a parameter the ranks agree which have a gradient: what has none on some ranks
    counts as zero there, what has none anywhere is left alone.

    `params` as in torch: parameters, pairs with names, or groups; their values are rank 0's
    afterwards. `optimizer_class` is any elementwise optimizer and `defaults` are its arguments;
    parameter groups and learning-rate schedules work as on it. `bucket_cap_mb` is in MiB. With
    `master_dtype` the optimizer works on a copy of its shard in that dtype (torch.float32 for bf16
    parameters). The parameters' memory becomes part of flat buffers; their strides stay. A
    parameter that is listed twice counts once; one that does not require a gradient has no state
    and no traffic until it does.

    Raises ValueError, the same on every rank, when the ranks' parameters or groups differ; and for
    an optimizer that is not elementwise, and for two parameters in the same memory.

    Rajbhandari et al. 2020, section 5.1 (arXiv:1910.02054); torch's is ZeroRedundancyOptimizer.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25.0,
        master_dtype: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        check_elementwise(optimizer_class)
        self.group, self.bucket_cap_mb = group, bucket_cap_mb
        self.world_size = dist.get_world_size(group)
        self.buckets: list[ShardedBucket] = []
        self.updates: list[ShardUpdate] = []  # of each bucket
        self._class, self._arguments, self._master_dtype = optimizer_class, defaults, master_dtype
        self._known: list[nn.Parameter] = []  # by position, as are the lists below
        self.names: list[str] = []
        self._used: list[bool] | None = None  # from when the gradients are reduced to the step
        self._versions: list[tuple[int, int]] = []  # of the gradients that were reduced
        template = optimizer_class([nn.Parameter(torch.empty(0))], **defaults)
        super().__init__(params, dict(template.defaults))

    @property
    def optims(self) -> list[torch.optim.Optimizer]:
        """The optimizers underneath, one a bucket, which hold this rank's states."""
        return [update.optim for update in self.updates]

    # The parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, on all ranks alike."""
        super().add_param_group(param_group)
        self._take_in(len(self.param_groups) - 1)

    def _take_in(self, group_index: int) -> None:
        """Shard those parameters of a group that require a gradient and are not sharded yet."""
        group, known = self.param_groups[group_index], {id(param) for param in self._known}
        new = {
            param: name_of(group, group_index, i)
            for i, param in enumerate(group["params"])
            if param.requires_grad and id(param) not in known
        }
        if not new:
            return
        params, names, first = list(new), list(new.values()), len(self._known)
        check_same(describe(group, names, params), self.group, params[0].device)
        check_own_memory([*self.names, *names], [*self._known, *params])
        broadcast(params, self.group)
        self._known += params
        self.names += names
        cap = self.bucket_cap_mb
        for planned in assign_buckets(params, bucket_cap_mb=cap, first_bucket_mb=cap):
            held, positions = [params[i] for i in planned.params], planned.params
            bucket = ShardedBucket(held, [first + i for i in positions], group_index, self.group)
            self._add(bucket)

    def _add(self, bucket: ShardedBucket) -> None:
        self.buckets.append(bucket)
        self.updates.append(
            ShardUpdate(
                bucket, self._class, self._settings(bucket), self._arguments, self._master_dtype
            )
        )

    def _settings(self, bucket: ShardedBucket) -> dict[str, Any]:
        group = self.param_groups[bucket.group_index]
        return {k: v for k, v in group.items() if k not in ("params", "param_names")}

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce, update, gather; while one bucket is updated, others are on their way."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gathers = []
        for index, used in self._reduced():
            self.updates[index].step(used, self._settings(self.buckets[index]))
            gathers.append(self.buckets[index].start_gather())
        for gather in gathers:
            gather.wait()
        torch.autograd.graph.increment_version(self._known)  # a graph that saved them is not valid
        self._used = None
        self._forget_means()
        return loss

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Each bucket's `shard_grad` holds the mean over ranks afterwards, and `step` uses it.

        For what must look at the means first, as clipping does. All ranks must call it.
        """
        for _ in self._reduced():
            pass

    def _reduced(self) -> Iterator[tuple[int, list[bool]]]:
        """The buckets that have a gradient on some rank, as soon as the means are there: the index,
        and which of the bucket's parameters have one."""
        if self._used is not None:
            self._check_unchanged()
            used, remaining = self._used, set[int]()
        else:
            for group_index in range(len(self.param_groups)):
                self._take_in(group_index)  # what has been unfrozen
            used, remaining = self._agree()
            self._versions = [_version(param) for param in self._known]
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

    def _agree(self) -> tuple[list[bool], set[int]]:
        """Which parameters have a gradient on some rank, and which buckets are to be reduced."""
        self._forget_means()
        has_grad = [param.grad is not None for param in self._known]
        (used,) = any_rank([has_grad], self.group, self._known[0].device)
        return used, set(range(len(self.buckets)))

    def _start_reduce(self, index: int) -> StartedReduce:
        bucket = self.buckets[index]
        flat_grad = bucket.new_flat()
        before = must_scale_before(flat_grad.dtype)
        factor = 1 / self.world_size if before else 1.0
        fill(bucket.views(flat_grad), [param.grad for param in bucket.params], factor)
        return bucket.start_reduce(flat_grad, scaled=before)

    def _forget_means(self) -> None:
        """The next step reduces what `.grad` holds then."""
        for bucket in self.buckets:
            bucket.shard_grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        super().zero_grad(set_to_none)
        self._used = None
        for bucket in self.buckets:
            bucket.shard_grad = None

    def _check_unchanged(self) -> None:
        for name, param, version in zip(self.names, self._known, self._versions, strict=True):
            if _version(param) != version:
                raise RuntimeError(
                    f"the gradient of {name} has changed since it was reduced (to be clipped?): "
                    "run all backwards first, then clip, then step"
                )

    # The gradients' norm, and what is saved

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """As torch's, of the means over ranks: every rank gets the norm of the whole gradient.

        Reduces the gradients, so it stands behind the last backward. `.grad` stays as it is.
        """
        self.reduce_gradients()
        means = [bucket.shard_grad for bucket in self.buckets if bucket.shard_grad is not None]
        device = self._known[0].device
        norm = norm_over_ranks(means, norm_type, self.group, device=device)
        if error_if_nonfinite:
            check_finite(norm, norm_type)
        factor = clip_factor(norm, max_norm)
        for mean in means:
            mean.mul_(factor.to(mean.device))
        return norm

    def state_dict(self) -> dict[str, Any]:
        """What a plain `optimizer_class` over the same parameters would save, on every rank.

        States are whole tensors in their parameters' shapes, so they load into any number of
        ranks, and into the plain optimizer. All ranks must call it.
        """
        return states.gather(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this rank's shard of what this or the plain optimizer saved, at any world size.

        Every rank passes the whole. Raises ValueError where groups, their lengths, or the shape of
        a state do not fit.
        """
        states.scatter(self, state_dict)


def _version(param: Tensor) -> tuple[int, int]:
    """Changes when the gradient is replaced or written to."""
    return (0, 0) if param.grad is None else (id(param.grad), param.grad._version)
