"""An optimizer whose parameters live on a device and whose states live on its host: its buckets,
the gradients that arrive there, and what it saves and loads."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from pdt.buckets import assign_buckets
from pdt.offload.arrivals import Arrivals, written_by_others
from pdt.offload.bus import Bus, bus_of
from pdt.offload.checks import check_dense, names_of, on_host
from pdt.offload.host_bucket import HostBucket


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
        **defaults: Any,
    ) -> None:
        self.buckets: list[HostBucket] = []
        self.transfer_cap_mb = transfer_cap_mb
        self._class, self._arguments = optimizer_class, defaults
        self._during_backward = during_backward
        self._place: dict[Tensor, tuple[HostBucket, int]] = {}
        self._group_of: dict[HostBucket, int] = {}
        self._seen: dict[Tensor, Mapping[str, Any] | None] = {}  # what `state` holds of the buckets
        self._hooks: list[Any] = []
        self._is_made = False
        template = optimizer_class([nn.Parameter(torch.empty(0))], **defaults)
        super().__init__(params, dict(template.defaults))
        self._is_made = True
        self.bus = bus or bus_of(self._device)
        self._arrivals = Arrivals(self.bus)
        self._lay_out()

    @property
    def _device(self) -> torch.device:
        params = (param for group in self.param_groups for param in group["params"])
        return next((param.device for param in params), torch.device("cpu"))

    @property
    def host_tensors(self) -> list[Tensor]:
        """What lies in the host's memory."""
        held = [tensor for bucket in self.buckets for tensor in bucket.host_tensors]
        return held + self._arrivals.inboxes

    @property
    def optims(self) -> list[torch.optim.Optimizer]:
        """The optimizers underneath, one a bucket, which hold the states."""
        return [bucket.optim for bucket in self.buckets]

    def synchronize(self) -> None:
        """The device's parameters are those after the last step."""

    # Buckets

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._is_made:
            self.synchronize()
            self._lay_out()

    @torch.no_grad()
    def _lay_out(self) -> None:
        """Buckets for what is trained now; `state` says how they go on."""
        self._arrivals.settle_all()
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
        for param, grad in waiting.items():
            if param in self._place:
                bucket, i = self._place[param]
                bucket.views(bucket.flat_grads)[i].copy_(grad)
                bucket.came.add(i)

    def _make_buckets(self, index: int, group: Mapping[str, Any]) -> None:
        named = {
            param: name
            for param, name in zip(group["params"], names_of(group, index), strict=True)
            if param.requires_grad or param.grad is not None
        }
        check_dense(named)
        params, cap = list(named), self.transfer_cap_mb
        for planned in assign_buckets(params, bucket_cap_mb=cap, first_bucket_mb=cap):
            held = [params[i] for i in planned.params]
            names = [named[param] for param in held]
            bucket = HostBucket(held, names, self.bus, self._class, self._arguments)
            self.buckets.append(bucket)
            self._group_of[bucket] = index
            self._read(bucket)
            for i, param in enumerate(held):
                self._place[param] = bucket, i
                if self.state.get(param):
                    bucket.set_state(i, self.state[param])
                self._seen[param] = self.state.get(param)
                if self._during_backward and param.requires_grad:
                    self._listen(param)

    def _listen(self, param: Tensor) -> None:
        optimizer = weakref.ref(self)  # a parameter must not keep its optimizer alive

        def left(param: Tensor) -> None:
            owner = optimizer()
            if owner is not None:
                owner._grad_is_complete(param)

        self._hooks.append(param.register_post_accumulate_grad_hook(left))

    def _read(self, bucket: HostBucket) -> None:
        """The host's masters are the device's parameters."""
        pairs = list(zip(bucket.params, bucket.views(bucket.flat), strict=True))
        self.bus.to_host([(p.detach(), view) for p, view in pairs], "parameters").wait()
        bucket.versions = [param._version for param in bucket.params]

    # Gradients

    def _grad_is_complete(self, param: Tensor) -> None:
        bucket, i = self._place[param]
        if param.data_ptr() != bucket.addresses[i]:
            return  # stage 3 has gathered it, and hands the shard's gradient out later
        if param.grad is None:
            raise RuntimeError(written_by_others(bucket.names[i]))
        bucket.ready.add(i)
        if len(bucket.ready) == len(bucket.params):
            self._arrivals.send(bucket)

    def _send_rest(self) -> None:
        params = {p for group in self.param_groups for p in group["params"]}
        has_new = any(p.grad is not None and p not in self._place for p in params)
        if has_new or self._place.keys() - params:
            self.synchronize()
            self._lay_out()
        for bucket in self.buckets:
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
        self.synchronize()
        return super().state_dict()

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
