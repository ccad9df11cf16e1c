"""Parameters that travel together, and what the host holds of them.

Words: a *master* is the host's copy of a parameter, in full precision, which the host's optimizer
steps; `flat_grads` is where the gradients arrive. Both lie flat, one parameter behind the other, so
that a bucket is one stretch of memory for the bus and for the processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pdt.flat import unflatten
from pdt.offload.adam import HostAdamW
from pdt.offload.bus import Bus, Pair, Transfer


class HostBucket:
    """`params` are on the device, all of one dtype; the rest of it is in the host's memory.

    For parameters in 16 bits, stepped by `HostAdamW`, the host holds 16 bytes each: masters and two
    states of 4, gradients of 2, and 2 in which the parameters return. Where several backwards are
    added up, or for another optimizer, gradients have 4.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        bus: Bus,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: Mapping[str, Any],
    ) -> None:
        self.params, self.names = list(params), list(names)
        dtype = params[0].dtype
        master_dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        self.numel = sum(p.numel() for p in params)
        self.flat = bus.empty(self.numel, master_dtype)
        self.masters = [nn.Parameter(view) for view in self.views(self.flat)]
        self._bus = bus
        self.returns = self.flat if dtype == master_dtype else bus.empty(self.numel, dtype)
        self.optim = optimizer_class([{"params": self.masters}], **defaults)
        takes_low = isinstance(self.optim, HostAdamW) and hasattr(self.flat, "grad_dtype")
        self._flat_grads = [bus.empty(self.numel, dtype if takes_low else master_dtype)]
        self._returned = self.views(self.returns)
        if self.returns is not self.flat and isinstance(self.optim, HostAdamW):
            self.optim.copies = dict(zip(self.masters, self._returned, strict=True))
        self._returning: Transfer | None = None  # which may be reading still
        self.came: set[int] = set()  # of what has arrived, or is under way, since the last step
        self.ready: set[int] = set()  # of what is complete on the device and has not left
        self.versions = [-1] * len(self.params)  # of the parameters as the host knows them
        self.addresses = [param.data_ptr() for param in params]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Of a flat tensor (numel,), what belongs to each parameter, laid out as it is."""
        return unflatten(flat, self.params)

    @property
    def flat_grads(self) -> Tensor:
        return self._flat_grads[0]

    def swap_grads(self) -> Tensor:
        """Let gradients arrive elsewhere from now on; returns where they have arrived until now."""
        if len(self._flat_grads) == 1:
            self._flat_grads.append(torch.empty(0))
        self._flat_grads.reverse()
        arrived = self._flat_grads[1]
        if self._flat_grads[0].dtype != arrived.dtype or not self._flat_grads[0].numel():
            self._flat_grads[0] = self._bus.empty(self.numel, arrived.dtype)
        return arrived

    def widen_grads(self) -> None:
        """Keep gradients in full precision from now on, for they are added up."""
        if self.flat_grads.dtype != self.flat.dtype:
            wide = self._bus.empty(self.numel, self.flat.dtype)
            self._flat_grads[0] = wide.copy_(self.flat_grads)

    @property
    def host_tensors(self) -> list[Tensor]:
        """All that it holds in the host's memory."""
        states = [v for s in self.optim.state.values() for v in s.values() if isinstance(v, Tensor)]
        own = [self.flat, *self._flat_grads, *states]
        return own if self.returns is self.flat else [*own, self.returns]

    def step(
        self, flat_grads: Tensor, used: Iterable[int], settings: Mapping[str, Any], scale: float
    ) -> list[Pair]:
        """The host's update of those that are `used`, whose gradients are divided by `scale`.

        Returns what is to be carried back.
        """
        self._let_return()
        grads, used = self.views(flat_grads), sorted(used)
        self.optim.param_groups[0].update(settings)
        if getattr(self.optim, "_step_supports_amp_scaling", False):  # divides as it reads them
            self.optim.grad_scale = torch.tensor(scale) if scale != 1.0 else None  # type: ignore[attr-defined]
        elif scale != 1.0:
            flat_grads.div_(scale)
        for i in used:
            if grads[i].dtype != self.masters[i].dtype:
                self.masters[i].grad_dtype = None  # of any dtype
            self.masters[i].grad = grads[i]
        self.optim.step()
        for i in used:
            self.masters[i].grad = None
        if self.returns is not self.flat and not isinstance(self.optim, HostAdamW):
            self.returns.copy_(self.flat)
        return [(self._returned[i], self.params[i]) for i in used]

    def returning(self, transfer: Transfer) -> None:
        """What `step` has given is being carried, and must not change meanwhile."""
        self._returning = transfer

    def _let_return(self) -> None:
        """A device may have waited for it, and the host not."""
        if self._returning is not None:
            self._returning.finish()
            self._returning = None

    @torch.no_grad()
    def follow(self, written: Sequence[int]) -> None:
        """The masters take over what was written to these parameters on the device."""
        views = self.views(self._bus.empty(self.numel, self.params[0].dtype))
        pairs = [(self.params[i].detach(), views[i]) for i in written]
        self._bus.to_host(pairs, "parameters").wait()
        self._let_return()
        for i in written:
            self._adopt(i, views[i])
            self.versions[i] = self.params[i]._version

    def _adopt(self, i: int, shown: Tensor) -> None:
        """The master stays where it is only finer than what its parameter shows."""
        master = self.masters[i]
        differs = master.to(shown.dtype) != shown
        torch.where(differs, shown.to(master.dtype), master, out=master)

    def read(self) -> None:
        """The masters are the device's parameters."""
        pairs = [(p.detach(), v) for p, v in zip(self.params, self.views(self.flat), strict=True)]
        self._bus.to_host(pairs, "parameters").wait()
        self.versions = [param._version for param in self.params]

    def state_of(self, i: int) -> Mapping[str, Any]:
        """The state of parameter `i` as torch has it, and its master."""
        master = self.masters[i]
        return {**self.optim.state.get(master, {}), "master_param": master.detach()}

    def whole_state_of(self, i: int) -> dict[str, Any]:
        """As `state_of`, in memory."""
        return dict(self.state_of(i))

    @torch.no_grad()
    def set_state(self, i: int, state: Mapping[str, Any]) -> None:
        """Go on with this state. Its master counts as far as the device's parameter is that master
        rounded (see `follow`), for a plain optimizer keeps one from before and does not step it."""
        self._let_return()
        master = self.masters[i]
        known = state.get("master_param")
        if isinstance(known, Tensor) and known.data_ptr() != master.data_ptr():
            master.copy_(known)
        self.versions[i] = -1
        kept = {name: value for name, value in state.items() if name != "master_param"}
        if kept:
            self.optim.state[master] = kept
        else:
            self.optim.state.pop(master, None)
