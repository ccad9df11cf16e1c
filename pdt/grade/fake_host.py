"""A device and its host without clocks: a bus that carries only when somebody waits.

So what a program reads before it has waited is NaN on every machine, and the order of events says
what would have run at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # of one shape: to be read, to be written
TO_HOST, TO_DEVICE = "to host", "to device"


class FakeTransfer:
    """Under way until `wait`, which first ends those before it in its direction."""

    def __init__(self, bus: FakeBus, pairs: Sequence[Pair], direction: str) -> None:
        self._bus, self.pairs, self.direction = bus, list(pairs), direction

    def wait(self) -> None:
        while self in self._bus.under_way[self.direction]:
            self._bus.carry_oldest(self.direction)


class FakeBus:
    """`to_host(pairs)` and `to_device(pairs)` as a `pdt.offload.Bus` has them."""

    def __init__(self) -> None:
        self.under_way: dict[str, deque[FakeTransfer]] = {TO_HOST: deque(), TO_DEVICE: deque()}
        self.nbytes, self.calls = {TO_HOST: 0, TO_DEVICE: 0}, {TO_HOST: 0, TO_DEVICE: 0}

    def to_host(self, pairs: Sequence[Pair], name: str = "gradients") -> FakeTransfer:
        return self._start(pairs, TO_HOST)

    def to_device(self, pairs: Sequence[Pair], name: str = "parameters") -> FakeTransfer:
        return self._start(pairs, TO_DEVICE)

    @torch.no_grad()
    def _start(self, pairs: Sequence[Pair], direction: str) -> FakeTransfer:
        transfer = FakeTransfer(self, pairs, direction)
        for source, target in transfer.pairs:
            if source.shape != target.shape:
                raise ValueError(f"{tuple(source.shape)} does not go into {tuple(target.shape)}")
            target.fill_(torch.nan)
            self.nbytes[direction] += source.nbytes
        self.calls[direction] += 1
        self.under_way[direction].append(transfer)
        return transfer

    @torch.no_grad()
    def carry_oldest(self, direction: str) -> None:
        transfer = self.under_way[direction].popleft()
        for source, target in transfer.pairs:
            target.copy_(source)
        transfer.pairs.clear()


class FakeHost:
    """SGD with momentum, by hand: `masters` in float32 or more, one for each parameter."""

    lr, momentum = 0.125, 0.5

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.dtypes = [p.dtype for p in params]
        wide = [torch.promote_types(dtype, torch.float32) for dtype in self.dtypes]
        self.masters = [p.detach().to(w, copy=True) for p, w in zip(params, wide, strict=True)]
        self._velocity = [torch.zeros_like(master) for master in self.masters]

    @torch.no_grad()
    def step(self, i: int, grad: Tensor) -> Tensor:
        """Step master i; returns its new values, rounded to the parameter's dtype."""
        self._velocity[i].mul_(self.momentum).add_(grad)
        self.masters[i].sub_(self._velocity[i], alpha=self.lr)
        return self.masters[i].to(self.dtypes[i], copy=True)
