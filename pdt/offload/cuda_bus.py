"""The bus of a GPU: pinned memory on the host, and a stream for each direction."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from pdt.comm.topology import Link
from pdt.offload.bus import TO_DEVICE, TO_HOST, Bus, Pair, Transfer, check_pairs


class CudaTransfer(Transfer):
    """Its end is an event: a device waits for it on its stream, a host in `wait`."""

    def __init__(self, pairs: Sequence[Pair], direction: str, name: str) -> None:
        super().__init__(pairs, direction, name)
        self.began = torch.cuda.Event(enable_timing=True)
        self.ended = torch.cuda.Event(enable_timing=True)

    def wait(self) -> None:
        if self.direction == TO_HOST:
            self.finish()
        else:
            torch.cuda.current_stream().wait_event(self.ended)

    def finish(self) -> None:
        self.ended.synchronize()
        self._pairs = ()

    def is_completed(self) -> bool:
        done = self.ended.query()
        if done:
            self._pairs = ()
        return done


class CudaBus(Bus):
    """The bus of a CUDA device, which must be the current one: pinned memory, two streams."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(None)
        self.device = device
        self._streams = {d: torch.cuda.Stream(device) for d in (TO_HOST, TO_DEVICE)}
        self._under_way: dict[str, deque[Transfer]] = {d: deque() for d in self._streams}
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record()
        self._zero.synchronize()
        self._zero_s = time.perf_counter()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def _start(self, pairs: Sequence[Pair], direction: str, name: str) -> Transfer:
        check_pairs(pairs, direction, name)
        transfer, stream = CudaTransfer(pairs, direction, name), self._streams[direction]
        with self._lock:  # the host's thread may send too
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.no_grad(), torch.cuda.stream(stream):
                transfer.began.record()
                for source, target in pairs:
                    target.copy_(source, non_blocking=True)
                transfer.ended.record()
            self._note(transfer)
            self._let_go(direction)
            self._under_way[direction].append(transfer)
        return transfer

    def _let_go(self, direction: str) -> None:
        """Of the tensors of what has ended; nobody else may ask for it."""
        under_way = self._under_way[direction]
        while under_way and under_way[0].is_completed():
            under_way.popleft()

    def _times_s(self, transfer: Transfer) -> tuple[float, float]:
        assert isinstance(transfer, CudaTransfer)
        events = (transfer.began, transfer.ended)
        first, last = (self._zero_s + self._zero.elapsed_time(event) / 1e3 for event in events)
        return first, last


def bus_of(device: torch.device, link: Link | None = None) -> Bus:
    """The device's own bus, or an emulated one where the device is a CPU."""
    return CudaBus(device) if device.type == "cuda" else Bus(link)
