"""A bucket whose masters and states lie in a file, and are in memory while they are stepped."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pdt.offload.adam import HostAdamW
from pdt.offload.bus import Bus, Pair, Transfer
from pdt.offload.files import TensorFiles
from pdt.offload.host_bucket import HostBucket
from pdt.offload.host_buffers import HostBuffers
from pdt.offload.items import Item
from pdt.offload.nvme import SwapWindow

ADAMS = (HostAdamW, torch.optim.Adam, torch.optim.AdamW)  # states are zero before the first step
MASTER = "master_param"


class FiledBucket(HostBucket):
    """Its memory is the window's while `_present`, and none at other times, but for gradients.

    A *plane* is the masters, or one of the states, of the whole bucket.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        bus: Bus,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: Mapping[str, Any],
    ) -> None:
        super().__init__(params, names, bus, optimizer_class, defaults)
        if not isinstance(self.optim, ADAMS):
            raise ValueError(
                f"files are for Adam and its kin, whose states begin at zero, not for "
                f"{type(self.optim).__name__}"
            )
        self.file_name = uuid.uuid4().hex
        self._window: SwapWindow | None = None  # until `open_window`
        self._staging: HostBuffers
        self._lent: Tensor | None = None  # of them, for what returns
        self._written: dict[int, Tensor] = {}  # what parameters show, to be taken over
        self._loaded: dict[int, Mapping[str, Any]] = {}  # states, likewise
        self._small = self._first_states(optimizer_class, defaults)
        self.item = Item(self.numel, (MASTER, *self._small[0]), self.flat.dtype)
        self._let_go()
        self._forget_returns()

    @property
    def state_names(self) -> list[str]:
        return [*self._small[1], *self._small[0], MASTER]

    def _first_states(
        self, optimizer_class: type[torch.optim.Optimizer], defaults: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, Any]]:
        """The planes' names, and what else is in a parameter's state before its first step."""
        trial = nn.Parameter(torch.zeros(2, dtype=self.flat.dtype))
        trial.grad = torch.zeros_like(trial)
        optim = optimizer_class([trial], **defaults)
        optim.step()
        state = optim.state[trial]
        planes = [k for k, v in state.items() if isinstance(v, Tensor) and v.shape == trial.shape]
        return planes, {k: v * 0 for k, v in state.items() if k not in planes}

    # In memory and in its file

    def read(self) -> None:
        """The file has the device's parameters and states that are zero."""
        assert self._window is not None
        self.flat = self._bus.empty(self.numel, self.item.dtype)
        super().read()
        zeros = self.flat.new_zeros(()).expand(self.numel)
        self._window.put(self.file_name, {MASTER: self.flat} | dict.fromkeys(self._small[0], zeros))
        self.flat = self.flat.new_empty(0)

    @contextmanager
    def _present(self, *, write: bool = True, in_turn: bool = True) -> Iterator[None]:
        """Masters and states are in memory, and written to the file after; a plan of reads that is
        not for them, if they are not used `in_turn`, is given up."""
        assert self._window is not None
        if not in_turn:
            self._window.drop()
        with self._window.item(self.file_name, write=write) as planes:
            try:
                self._take(planes)
                yield
            finally:
                self._let_go()

    def _take(self, planes: Mapping[str, Tensor]) -> None:
        self.flat = planes[MASTER]
        views = {name: self.views(plane) for name, plane in planes.items()}
        for i, master in enumerate(self.masters):
            master.data = views[MASTER][i]
            state = self.optim.state[master]
            for name, value in self._small[1].items():
                state.setdefault(name, value.clone())
            for name in self._small[0]:
                state[name] = views[name][i]
            if i in self._loaded:
                self._put(i, self._loaded.pop(i))
            if i in self._written:
                self._adopt(i, self._written.pop(i))

    def _put(self, i: int, loaded: Mapping[str, Any]) -> None:
        state = self.optim.state[self.masters[i]]
        self.masters[i].detach().copy_(loaded.get(MASTER, self.masters[i]))
        for name in self._small[0]:
            state[name].copy_(loaded.get(name, torch.zeros(())))
        state.update({name: loaded[name] for name in self._small[1] if name in loaded})

    def _let_go(self) -> None:
        self.flat = self.flat.new_empty(0)
        for master in self.masters:
            master.data = self.flat
            for name in self._small[0]:
                self.optim.state[master].pop(name, None)

    # As a bucket in memory

    def step(
        self, flat_grads: Tensor, used: Iterable[int], settings: Mapping[str, Any], scale: float
    ) -> list[Pair]:
        """As in memory; what is to be carried back is a copy, since the window goes on."""
        dtype = self.params[0].dtype
        with self._present():
            self._lent = self._staging.take(self.numel * dtype.itemsize)
            self.returns = self._lent.view(dtype)
            self._returned = self.views(self.returns)
            if isinstance(self.optim, HostAdamW):
                self.optim.copies = dict(zip(self.masters, self._returned, strict=True))
            return super().step(flat_grads, used, settings, scale)

    def returning(self, transfer: Transfer) -> None:
        """What `step` has given is being carried, and its memory is free after."""
        if self._lent is not None:
            self._staging.give(self._lent, transfer)
        self._forget_returns()

    def _forget_returns(self) -> None:
        self._lent, self.returns, self._returned = None, self.flat, []
        if isinstance(self.optim, HostAdamW):
            self.optim.copies = {}

    def _adopt(self, i: int, shown: Tensor) -> None:
        if self.masters[i].shape == shown.shape:
            super()._adopt(i, shown)
        else:  # it is in the file
            self._written[i] = shown

    def whole_state_of(self, i: int) -> dict[str, Any]:
        with self._present(write=bool(self._loaded or self._written), in_turn=False):
            state = super().state_of(i)
            return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}

    def state_of(self, i: int) -> Mapping[str, Any]:
        return FiledState(self, i)

    def set_state(self, i: int, state: Mapping[str, Any]) -> None:
        self._loaded[i] = dict(state)
        self.versions[i] = -1


class FiledState(Mapping[str, Any]):
    """The state of a parameter, which is read from the file when somebody looks at it."""

    def __init__(self, bucket: FiledBucket, i: int) -> None:
        self._bucket, self._i = bucket, i

    def __getitem__(self, name: str) -> Any:
        if name not in self._bucket.state_names:
            raise KeyError(name)
        return self._bucket.whole_state_of(self._i)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bucket.state_names)

    def __len__(self) -> int:
        return len(self._bucket.state_names)


def open_window(
    files: TensorFiles, buckets: Iterable[HostBucket], staging: HostBuffers
) -> SwapWindow:
    """To the files of these buckets, which are written by their `read`."""
    filed = [bucket for bucket in buckets if isinstance(bucket, FiledBucket)]
    window = SwapWindow(files, {bucket.file_name: bucket.item for bucket in filed})
    for bucket in filed:
        bucket._window, bucket._staging = window, staging
    return window


def close_window(window: SwapWindow) -> None:
    """Its buckets are used no more, and their files go."""
    window.close()
    for name in window.items:
        window.files.delete(name).wait()
