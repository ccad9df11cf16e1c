"""An optimizer whose states are sharded: its parameters and shards, and what it saves and loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pdt.buckets import assign_buckets, names_of
from pdt.comm.replicate import broadcast
from pdt.zero import states
from pdt.zero.bucket import ShardedBucket
from pdt.zero.checks import (
    Version,
    check_own_memory,
    check_same_or_raise,
    describe,
)
from pdt.zero.scratch import Scratch
from pdt.zero.update import ShardUpdate, check_elementwise


class ShardedOptimizer(torch.optim.Optimizer):
    """What stages 1 and 2 share but for the step; see `Zero1` for its arguments."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25.0,
        master_dtype: torch.dtype | None = None,
        keep_buffers: bool = False,
        **defaults: Any,
    ) -> None:
        self.group, self.bucket_cap_mb = group, bucket_cap_mb
        self.world_size = dist.get_world_size(group)
        self.buckets: list[ShardedBucket] = []
        self.updates: list[ShardUpdate] = []  # of each bucket
        self._scratch = Scratch(keep=keep_buffers)
        self._class, self._arguments, self._master_dtype = optimizer_class, defaults, master_dtype
        self._known: list[nn.Parameter] = []  # by position, as are the lists below
        self.names: list[str] = []
        self._known_ids: set[int] = set()
        self._used: list[bool] | None = None  # from when the gradients are reduced to the step
        self._versions: list[Version] = []  # of the gradients that were reduced
        self._is_made = False
        self._take_in(lambda: self._begin(params))

    def _begin(self, params: Iterable[Any]) -> None:
        check_elementwise(self._class)
        template = self._class([nn.Parameter(torch.empty(0))], **self._arguments)
        super().__init__(params, dict(template.defaults))
        self._is_made = True

    @property
    def optims(self) -> list[torch.optim.Optimizer]:
        """The optimizers underneath, one a bucket, which hold this rank's states."""
        return [update.optim for update in self.updates]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, on all ranks alike."""
        add = super().add_param_group
        if self._is_made:
            self._take_in(lambda: add(param_group))
        else:
            add(param_group)

    def _take_in(self, add: Callable[[], object] = lambda: None) -> None:
        """Run `add`, which may add groups, and shard what requires a gradient and is not sharded
        yet. What is wrong on one rank is raised on all, and no group is added then."""
        before, failed = list(getattr(self, "param_groups", [])), None
        try:
            add()
            self._check_groups()
        except Exception as error:
            failed = error
        try:
            check_same_or_raise(self._describe(), failed, self.group, self._device)
        except Exception:
            self.param_groups = before
            raise
        params = dict.fromkeys(p for group in self.param_groups for p in group["params"])
        broadcast([p for p in params if id(p) not in self._known_ids], self.group)
        for group_index in range(len(self.param_groups)):
            self._shard(group_index)

    def _check_groups(self) -> None:
        """What this rank can see by itself, before anything is changed."""
        check_own_memory(self.param_groups)

    def _new(self) -> list[tuple[str, nn.Parameter]]:
        """What requires a gradient and is not sharded yet, with its name."""
        known, found = self._known_ids, []
        for index, group in enumerate(self.param_groups):
            for i, param in enumerate(group["params"]):
                if param.requires_grad and id(param) not in known:
                    found.append((names_of(group, index)[i], param))
        return found

    def _describe(self) -> list[str]:
        optimizer = (
            f"{self._class.__name__}, bucket_cap_mb={self.bucket_cap_mb}, "
            f"master_dtype={self._master_dtype}"
        )
        return describe(optimizer, getattr(self, "param_groups", []))

    @property
    def _device(self) -> torch.device:
        """Where the ranks agree: on the first parameter's device."""
        groups = getattr(self, "param_groups", [])
        params = (param for group in groups for param in group["params"])
        backend = dist.get_backend(self.group)
        default = torch.device("cuda" if backend.endswith("nccl") else "cpu")
        return next((param.device for param in params), default)

    def _shard(self, group_index: int) -> None:
        """Buckets for those of a group that require a gradient and are not sharded yet."""
        group, known = self.param_groups[group_index], self._known_ids
        named = zip(group["params"], names_of(group, group_index), strict=True)
        new = {p: name for p, name in named if p.requires_grad and id(p) not in known}
        params, first, cap = list(new), len(self._known), self.bucket_cap_mb
        self._known += params
        self._known_ids.update(map(id, params))
        self.names += new.values()
        for planned in assign_buckets(params, bucket_cap_mb=cap, first_bucket_mb=cap):
            held, positions = [params[i] for i in planned.params], planned.params
            numbers = [first + i for i in positions]
            of = (group_index, self.group, self._master_dtype, self._scratch)
            self._add(ShardedBucket(held, numbers, *of))

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

    def __reduce__(self) -> Any:
        raise RuntimeError(
            f"a {type(self).__name__} cannot be copied or pickled, for it holds a process group: "
            "save its state_dict(), and load that into a new one"
        )
