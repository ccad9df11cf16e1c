"""Data parallelism with the interface of torch's DistributedDataParallel."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from pdt.buckets import Bucket
from pdt.comm.replicate import broadcast, check_same, describe
from pdt.ddp.hooks import Hook, all_reduce_hook
from pdt.ddp.join import BACKWARD, FORWARD, Join
from pdt.ddp.reducer import Reducer
from pdt.ddp.slots import Settings
from pdt.listen import output_tensors


class DDP(nn.Module):
    """Wraps `module` so that `loss.backward()` leaves the mean of all ranks' gradients in `.grad`.

    Every rank holds all parameters, all gradients (as views into flat buckets) and, from the
    construction on, rank 0's initial values. `group` is a process group (default: all ranks).
    `bucket_cap_mb` and `first_bucket_mb` are MiB, see `pdt.buckets` (torch has 1 MiB for the first
    bucket only while it is not told a cap). `comm_hook` says what a bucket sends, see
    `pdt.ddp.hooks`. `find_unused_parameters` lets a parameter have no gradient: it counts as zero
    on ranks that have none, and is left alone where no rank has one; it costs one all-reduce of
    four bytes a parameter per step. `broadcast_buffers` sends rank 0's buffers in each training
    forward. `grad_dtype` keeps gradients, their accumulation and their reduction in another dtype
    than the parameters': torch.float32 for bf16 parameters costs four bytes a parameter instead of
    two, in memory and on the wire, and `.grad` is then fp32. A sparse gradient arrives dense.

    Raises ValueError, the same on every rank, when the ranks' modules differ in a parameter's or
    buffer's name, shape, strides, dtype or requires_grad; and RuntimeError in the backward in which
    a gradient could not be averaged, naming the parameter.

    Li et al. 2020 (arXiv:2006.15704); torch/nn/parallel/distributed.py.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        comm_hook: Hook | None = None,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self._settings = Settings(
            group,
            bucket_cap_mb,
            first_bucket_mb,
            comm_hook or all_reduce_hook,
            find_unused_parameters,
            grad_dtype,
        )
        self._sync = True
        self._join: Join | None = None
        check_same(describe(module), group, _device_of(module))
        self._look_at_module()
        broadcast([*module.parameters(), *module.buffers()], group)

    @property
    def buckets(self) -> list[Bucket]:
        """The plan: by reverse registration at first, after one backward in the order that came."""
        return self._reducer.plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; whether its backward is synchronised is decided here, not there."""
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1:  # a checkpoint's recomputation is no new step
            self._before_step()
        output = self.module(*args, **kwargs)
        for tensor in output_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(self._reducer.begin, self._sync))
        return output

    def _before_step(self) -> None:
        if self._reducer.is_open:
            self._reducer.abandon()
        self._follow_module()
        self._reducer.sync = self._sync
        if not self._sync:
            return
        if self._join is not None:
            self._join.tell(FORWARD)
        self._share_buffers(self._join.source if self._join else 0)

    def _look_at_module(self) -> None:
        """Note what there is, so that a step need not walk through the module."""
        self._reducer = Reducer(_trainable(self.module), self._settings)
        self._owners = _owners(self.module)
        self._buffer_owners = [
            (child._buffers, name) for child in self.module.modules() for name in child._buffers
        ]

    def _share_buffers(self, source: int) -> None:
        if self.training and self.broadcast_buffers and self._buffer_owners:
            found = [owned.get(name) for owned, name in self._buffer_owners]
            buffers = [buffer for buffer in found if buffer is not None]
            broadcast(buffers, self._settings.group, source)

    def _follow_module(self) -> None:
        """Plan again when a parameter was frozen, unfrozen or replaced: on all ranks, or it raises.

        A parameter or buffer that is added later is not seen; wrap the module again then.
        """
        for owned, name, param, trained in self._owners:
            if owned.get(name) is not param or param.requires_grad != trained:
                break
        else:
            return
        check_same(describe(self.module), self._settings.group, _device_of(self.module))
        before = self._reducer
        before.close()
        self._look_at_module()
        self._reducer.scale, self._reducer.before_sync = before.scale, before.before_sync
        accumulated = {id(slot.param) for slot in before.slots if slot.unreduced}
        for slot in self._reducer.slots:
            slot.unreduced = id(slot.param) in accumulated

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in this block have a backward that only adds up on this rank.

        The first backward of a forward outside the block reduces the sum of all. As in torch, what
        counts is where the forward stands.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextmanager
    def join(
        self,
        *,
        divide_by_initial_world_size: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Train in this block with as many batches as each rank has.

        A rank that leaves the block early answers the others' calls with zeros until all have left.
        Means are over all ranks, or over those that still have batches
        (`divide_by_initial_world_size=False`). In the end every rank holds the parameters and
        buffers of the rank that trained longest. `throw_on_early_termination` raises on every rank
        instead as soon as one has no batch left.
        """
        settings, reducer = self._settings, self._reducer

        def set_scale(scale: float) -> None:
            self._reducer.scale = scale

        self._join = joined = Join(
            settings.group,
            _device_of(self.module),
            set_scale,
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        )
        usual, reducer.before_sync = reducer.scale, lambda: joined.tell(BACKWARD)
        try:
            yield
            joined.shadow(self._share_buffers, self._reducer.shadow)
            broadcast(
                [*self.module.parameters(), *self.module.buffers()], settings.group, joined.source
            )
        finally:
            self._join = None
            self._reducer.scale, self._reducer.before_sync = usual, lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> DDP:
        """A wrapper of a copy of the module, on the same group; it averages by itself."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        hook = copy.deepcopy(self._settings.hook, memo)
        state = {
            key: copy.deepcopy(value, memo)
            for key, value in self.__getstate__().items()
            if key != "_settings"
        }
        twin.__setstate__(state | {"_settings": dataclasses.replace(self._settings, hook=hook)})
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to the processes of now: hooks, buckets, a join."""
        return {
            key: value
            for key, value in self.__dict__.items()
            if key not in ("_reducer", "_owners", "_buffer_owners", "_join")
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(dict(state))
        self._join = None
        self._look_at_module()


def _trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that get a gradient; a tied one once."""
    for name, param in module.named_parameters():
        if is_lazy(param):
            raise ValueError(f"parameter {name!r} has no shape yet: run one forward, then wrap")
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("the module has no parameter that requires a gradient: no need of DDP")
    return named


def _device_of(module: nn.Module) -> torch.device:
    param = next((p for p in module.parameters() if p.requires_grad), None)
    return param.device if param is not None else torch.device("cpu")


def _owners(module: nn.Module) -> list[tuple[dict[str, Any], str, nn.Parameter, bool]]:
    """Where each parameter hangs, so that a look at each tells whether it has changed."""
    return [
        (child._parameters, name, param, param.requires_grad)
        for child in module.modules()
        for name, param in child._parameters.items()
        if param is not None
    ]
