"""The way between a device and its host: copies that run while both of them compute.

A GPU has its own (`cuda_bus`). Elsewhere the bus is emulated: tensors of "the device" and of "the
host" lie in the same memory, a thread for each direction really copies them, and a transfer is over
when a wire of the given bandwidth would have carried it. Waiting uses no core, so what is hidden
behind computation is really hidden.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from pdt.comm.topology import Link
from pdt.measure.timeline import Span

Pair = tuple[Tensor, Tensor]  # of the same shape: to be read, to be written
TO_HOST, TO_DEVICE = "to host", "to device"  # a timeline's lanes have these names
_TIMEOUT_S = 300.0  # for one transfer: what takes longer has lost its thread
_REMEMBERED = 10_000  # transfers whose times are kept


class Transfer:
    """Copies under way. `wait()` returns when the receiver may read, and again at once after.

    Their tensors are held, and must not be touched, until `is_completed()`.
    """

    def __init__(self, pairs: Sequence[Pair], direction: str, name: str) -> None:
        self.direction, self.name = direction, name
        self.nbytes = sum(source.nbytes for source, _ in pairs)
        self.start_s = self.end_s = 0.0  # of the time on the wire, `perf_counter` seconds
        self._pairs: Sequence[Pair] = pairs
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Raises what the copy raised, and RuntimeError when it does not end."""
        if not self._done.wait(_TIMEOUT_S):
            raise RuntimeError(f"{self.name} {self.direction} has not ended in {_TIMEOUT_S:g} s")
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """As `wait`, and the sender may write again too."""
        self.wait()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def run(self) -> None:
        """Copy now; never raises, for whoever waits is told."""
        try:
            with torch.no_grad():
                for source, target in self._pairs:
                    target.copy_(source)
        except BaseException as error:
            self._error = error

    def end(self, start_s: float, end_s: float) -> None:
        self._pairs = ()  # what is carried need not live any longer
        self.start_s, self.end_s = start_s, end_s
        self._done.set()


Lane = tuple["queue.SimpleQueue[Transfer | None]", threading.Thread]  # of one direction


class Bus:
    """Carries tensors between a device and its host, in each direction one after the other.

    `link`: the latency (seconds a transfer) and bandwidth (bytes per second, each direction has
    its own) of an emulated bus; None copies as fast as memory does. `transfers` has the latest, and
    `nbytes`, `calls` and `spans` say what has been carried since `clear`. Close it, or use it in a
    `with` block, to end its threads; a bus that nobody holds any longer ends them too.
    """

    def __init__(self, link: Link | None = None) -> None:
        self.link = link
        self.transfers: deque[Transfer] = deque(maxlen=_REMEMBERED)
        self._nbytes: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._lanes: dict[str, Lane] = {}
        self._end = weakref.finalize(self, _end_lanes, self._lanes)
        self._lock = threading.Lock()

    def __enter__(self) -> Bus:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def to_host(self, pairs: Sequence[Pair], name: str = "gradients") -> Transfer:
        """Begin to copy from the device, after what it has been told to do up to now."""
        return self._start(pairs, TO_HOST, name)

    def to_device(self, pairs: Sequence[Pair], name: str = "parameters") -> Transfer:
        """Begin to copy to the device."""
        return self._start(pairs, TO_DEVICE, name)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host (numel,) that this bus copies from and to without a detour."""
        return torch.empty(numel, dtype=dtype)

    def nbytes(self, direction: str) -> int:
        """Bytes carried "to host" or "to device" since `clear`."""
        return self._nbytes[_known(direction)]

    def calls(self, direction: str) -> int:
        """Transfers "to host" or "to device" since `clear`."""
        return self._calls[_known(direction)]

    def spans(self, rank: int = 0) -> list[Span]:
        """When the latest transfers were on the wire, for a `Timeline`; waits for all under way."""
        for transfer in self.transfers:
            transfer.finish()
        return [
            Span(t.name, *self._times_s(t), t.direction, t.name, rank, t.nbytes)
            for t in self.transfers
        ]

    def clear(self) -> None:
        """Forget what has been carried."""
        self.transfers.clear()
        self._nbytes.clear()
        self._calls.clear()

    def close(self) -> None:
        """End the threads, after what is under way; a later transfer starts new ones."""
        for thread in _end_lanes(self._lanes):
            thread.join(_TIMEOUT_S)

    def _start(self, pairs: Sequence[Pair], direction: str, name: str) -> Transfer:
        check_pairs(pairs, direction, name)
        transfer = Transfer(pairs, direction, name)
        with self._lock:
            if direction not in self._lanes:
                self._lanes[direction] = _new_lane(self.link or Link(0.0, float("inf")))
            self._lanes[direction][0].put(transfer)
            self._note(transfer)
        return transfer

    def _note(self, transfer: Transfer) -> None:
        self.transfers.append(transfer)
        self._nbytes[transfer.direction] += transfer.nbytes
        self._calls[transfer.direction] += 1

    def _times_s(self, transfer: Transfer) -> tuple[float, float]:
        return transfer.start_s, transfer.end_s


def _known(direction: str) -> str:
    if direction not in (TO_HOST, TO_DEVICE):
        raise ValueError(f"direction={direction!r} is neither {TO_HOST!r} nor {TO_DEVICE!r}")
    return direction


def check_pairs(pairs: Sequence[Pair], direction: str, name: str) -> None:
    """ValueError when a tensor does not go into its place."""
    for source, target in pairs:
        if source.shape != target.shape:
            raise ValueError(
                f"{name} {direction}: a tensor of shape {tuple(source.shape)} does not go into one "
                f"of shape {tuple(target.shape)}"
            )


def _new_lane(link: Link) -> Lane:
    waiting: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
    thread = threading.Thread(target=_carry, args=(waiting, link), daemon=True, name="pdt-bus")
    thread.start()
    return waiting, thread


def _carry(waiting: queue.SimpleQueue[Transfer | None], link: Link) -> None:
    """One direction: a transfer is over when it has been copied and its time has passed."""
    while (transfer := waiting.get()) is not None:
        start_s = time.perf_counter()
        transfer.run()
        left_s = start_s + link.latency_s + transfer.nbytes / link.bandwidth - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        transfer.end(start_s, time.perf_counter())
        del transfer  # its tensors end with their user's


def _end_lanes(lanes: dict[str, Lane]) -> list[threading.Thread]:
    """Tell the threads to end after what waits; returns them."""
    told = []
    while lanes:
        _, (waiting, thread) = lanes.popitem()
        waiting.put(None)
        told.append(thread)
    return told
