"""An optimizer whose parameters live on a device and whose states live on its host: its buckets,
the gradients that arrive there, and what it saves and loads."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from pdt.buckets import assign_buckets, names_of
from pdt.offload.arrivals import Arrivals, written_by_others
from pdt.offload.bus import Bus
from pdt.offload.checks import check_plain, on_host
from pdt.offload.cuda_bus import bus_of
from pdt.offload.filed_bucket import FiledBucket, close_window, open_window
from pdt.offload.files import TensorFiles
from pdt.offload.host_bucket import HostBucket
from pdt.offload.host_buffers import HostBuffers
from pdt.offload.nvme import SwapWindow


class HostedOptimizer(torch.optim.Optimizer):
    """What `OffloadedOptimizer` is but for the step; see there for the arguments."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        bus: Bus | None,
        transfer_cap_mb: float,
        during_backward: bool,
        files: TensorFiles | None,
        **defaults: Any,
    ) -> None:
        self.buckets: list[HostBucket] = []
        self.transfer_cap_mb = transfer_cap_mb
        self._class, self._arguments = optimizer_class, defaults
        self._during_backward, self._files = during_backward, files
        self.window: SwapWindow | None = None  # to the files
        self._planned: list[str] = []  # what is read for the step that comes
        self._stepped: list[str] = []
        self._place: dict[Tensor, tuple[HostBucket, int]] = {}
        self._group_of: dict[HostBucket, int] = {}
        self._seen: dict[Tensor, Mapping[str, Any] | None] = {}  # what `state` holds of the buckets
        self._hooks: list[Any] = []
        self._is_made = False
        template = optimizer_class([nn.Parameter(torch.empty(0))], **defaults)
        super().__init__(params, dict(template.defaults))
        self._is_made = True
        self.bus = bus or bus_of(self._device)
        self._buffers = HostBuffers(self.bus)
        self._arrivals = Arrivals(self.bus, self._buffers)
        self._lay_out()

    @property
    def _device(self) -> torch.device:
        params = (param for group in self.param_groups for param in group["params"])
        return next((param.device for param in params), torch.device("cpu"))

    @property
    def host_tensors(self) -> list[Tensor]:
        """What lies in the host's memory."""
        held = [tensor for bucket in self.buckets for tensor in bucket.host_tensors]
        window = [] if self.window is None else self.window.buffers
        return held + window + self._buffers.tensors

    @property
    def optims(self) -> list[torch.optim.Optimizer]:
        """The optimizers underneath, one a bucket, which hold the states."""
        return [bucket.optim for bucket in self.buckets]

    def synchronize(self) -> None:
        """The device's parameters are those after the last step."""

    def _wait_for(self, bucket: HostBucket) -> None:
        """The host has done with the bucket's gradients."""

    def _to_step(self) -> list[HostBucket]:
        """What has gradients, in the order in which it is stepped."""
        return [bucket for bucket in self.buckets if bucket.came]

    # Buckets

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._is_made:
            self.synchronize()
            self._lay_out()

    @torch.no_grad()
    def _lay_out(self) -> None:
        """Buckets for what is trained now, which go on with the states that there are."""
        self._arrivals.settle_all()
        states = {p: self._whole_state(p) for p in self.state}
        waiting = {
            bucket.params[i]: bucket.views(bucket.flat_grads)[i].clone()
            for bucket in self.buckets
            for i in bucket.came
        }
        for hook in self._hooks:
            hook.remove()
        self.buckets, self._place, self._group_of, self._hooks = [], {}, {}, []
        for index, group in enumerate(self.param_groups):
            self._make_buckets(index, group)
        if self._files is not None:
            if self.window is not None:
                close_window(self.window)
            self.window = open_window(self._files, self.buckets, self._buffers)
            self._planned, self._stepped = [], []
        for bucket in self.buckets:
            bucket.read()
            for i, param in enumerate(bucket.params):
                if states.get(param):
                    bucket.set_state(i, states[param])
                self._seen[param] = self.state.get(param)
                if param in waiting:
                    bucket.views(bucket.flat_grads)[i].copy_(waiting[param])
                    bucket.came.add(i)

    def _make_buckets(self, index: int, group: Mapping[str, Any]) -> None:
        named = {
            param: name
            for param, name in zip(group["params"], names_of(group, index), strict=True)
            if param.requires_grad or param.grad is not None
        }
        check_plain(named)
        params, cap = list(named), self.transfer_cap_mb
        for planned in assign_buckets(params, bucket_cap_mb=cap, first_bucket_mb=cap):
            held = [params[i] for i in planned.params]
            names = [named[param] for param in held]
            kind = HostBucket if self._files is None else FiledBucket
            bucket = kind(held, names, self.bus, self._class, self._arguments)
            self.buckets.append(bucket)
            self._group_of[bucket] = index
            for i, param in enumerate(held):
                self._place[param] = bucket, i
                if self._during_backward and param.requires_grad:
                    self._listen(param)

    def _whole_state(self, param: Tensor) -> Mapping[str, Any]:
        """What `state` says of it, with what it does not show because it lies in files."""
        shown = self.state[param]
        if shown is not self._seen.get(param) or param not in self._place:
            return shown  # somebody has put it there
        bucket, i = self._place[param]
        return bucket.whole_state_of(i)

    def _plan_reads(self, *, again: bool = False) -> None:
        """Begin to read what will be stepped, as far as it is in files: what has a gradient, or
        `again` what was stepped last."""
        if self.window is None or (again and self._planned):
            return
        if again:  # behind what a late update may still be reading
            self._planned = self._stepped
            self.window.plan(self._planned)
            return
        self._stepped = [b.file_name for b in self._to_step() if isinstance(b, FiledBucket)]
        if self._stepped != self._planned:
            self.window.drop()
            self.window.plan(self._stepped)
        self._planned = []

    def _listen(self, param: Tensor) -> None:
        optimizer = weakref.ref(self)  # a parameter must not keep its optimizer alive

        def left(param: Tensor) -> None:
            owner = optimizer()
            if owner is not None:
                owner._grad_is_complete(param)

        self._hooks.append(param.register_post_accumulate_grad_hook(left))

    # Gradients

    def _grad_is_complete(self, param: Tensor) -> None:
        bucket, i = self._place[param]
        if param.data_ptr() != bucket.addresses[i]:
            return  # stage 3 has gathered it, and hands the shard's gradient out later
        if param.grad is None:
            raise RuntimeError(written_by_others(bucket.names[i]))
        self._plan_reads(again=True)
        bucket.ready.add(i)
        if len(bucket.ready) == len(bucket.params):
            self._wait_for(bucket)
            self._arrivals.send(bucket)

    def _send_rest(self) -> None:
        params = {p for group in self.param_groups for p in group["params"]}
        has_new = any(p.grad is not None and p not in self._place for p in params)
        if has_new or self._place.keys() - params:
            self.synchronize()
            self._lay_out()
        for bucket in self.buckets:
            self._wait_for(bucket)
            self._arrivals.send_rest(bucket)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, here and on the host; `.grad` is None, whatever `set_to_none`."""
        self._arrivals.settle_all()
        for bucket in self.buckets:
            bucket.came.clear()
            bucket.ready.clear()
        super().zero_grad(set_to_none=True)

    def grads(self) -> list[Tensor]:
        """The gradients as they have arrived on the host, before any scaling, by bucket."""
        self._send_rest()
        self._arrivals.settle_all()
        return [b.views(b.flat_grads)[i] for b in self.buckets for i in sorted(b.came)]

    # What is saved

    def state_dict(self) -> dict[str, Any]:
        """As the plain optimizer's, with masters; what lies in files is read for it."""
        self.synchronize()
        shown = self.state
        self.state = defaultdict(dict, {p: self._whole_state(p) for p in shown})
        try:
            return super().state_dict()
        finally:
            self.state = shown

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of this class, or of the plain optimizer; states go to the host, in full precision."""
        self.synchronize()
        super().load_state_dict({**state_dict, "state": {}})  # torch would move them to the device
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params, strict=True):
            if index in state_dict["state"]:
                self.state[param] = on_host(state_dict["state"][index], param)

    def __reduce__(self) -> Any:
        raise RuntimeError(
            f"a {type(self).__name__} cannot be copied or pickled, for it holds a bus: save its "
            "state_dict(), and load that into a new one"
        )
