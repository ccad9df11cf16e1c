"""An emulated wire: a transfer completes when the modelled link would have delivered it.

The real transfer runs underneath; its work is held back by a sleeping thread until the alpha-beta
law of `pdt.comm.cost` says the last byte has arrived, so waiting uses no core and the overlap that
a program achieves is real. The model holds while the modelled wire is slower than the real one.

A rank has one port with two directions. Its transfers share them in the order of the calls: a
collective takes both from the moment that all its ranks have called and have a free port; a message
takes the sender's way out when it is sent and the receiver's way in when its first byte arrives,
so many senders queue at one receiver. Ranks tell each other these moments through shared memory.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from pdt.comm.cost import time_s
from pdt.comm.record import Record
from pdt.comm.topology import Link
from pdt.segment import exchange

SLOTS = 256  # moments kept per stream: a rank may be this many messages ahead of its peer
SHORTEST_NAP_S, LONGEST_NAP_S = 20e-6, 1e-3


class Port:
    """One rank's end of the wire, shared by all its groups: when each direction is free again."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._free = {"send": 0.0, "recv": 0.0}
        self._lock = threading.Lock()

    def free_at(self, *directions: str) -> float:
        with self._lock:
            return max(self._free[direction] for direction in directions)

    def take(self, start_s: float, seconds: float, *directions: str) -> float:
        """Occupy the directions from `start_s`, or from when they are free; the end."""
        with self._lock:
            end_s = max(start_s, *(self._free[d] for d in directions)) + seconds
            for direction in directions:
                self._free[direction] = end_s
            return end_s


class LinkWork(Work):
    """Completes when the wire has delivered; fails as the real transfer failed."""

    def __init__(self) -> None:
        super().__init__()
        self._done = threading.Event()
        self._future: torch.futures.Future = torch.futures.Future()
        self._error: BaseException | None = None
        self.source = -1

    def finish(self, result: Any, error: BaseException | None) -> None:
        self._error = error
        self._done.set()
        if error is None:
            self._future.set_result(result)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else None
        if not self._done.wait(seconds or None):
            raise RuntimeError(f"the transfer has not arrived within {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def get_future(self) -> torch.futures.Future:
        return self._future

    def _source_rank(self) -> int:
        return self.source


class Clock:
    """Moments that ranks of a group tell each other, by stream and count, in shared memory.

    Stream 0 is the group's collectives; stream 1 + p is the messages to group rank p. The time is
    written before its count, so a reader that sees the count sees the time.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        nbytes = (1 + size) * SLOTS * 16
        segments = exchange(store, "pdt-link", rank, size, nbytes, timeout_s)
        self._views = [memoryview(s.buffer or b"").cast("B").cast("d") for s in segments]
        self._rank, self._timeout_s = rank, timeout_s

    def tell(self, stream: int, count: int, at_s: float) -> None:
        slot = 2 * (stream * SLOTS + count % SLOTS)
        own = self._views[self._rank]
        own[slot + 1] = at_s
        own[slot] = count

    def ask(self, rank: int, stream: int, count: int) -> float:
        """The moment that `rank` told; waits for it. Long ago (0.0) if it has been overwritten."""
        slot = 2 * (stream * SLOTS + count % SLOTS)
        view, deadline = self._views[rank], time.perf_counter() + self._timeout_s
        nap_s = SHORTEST_NAP_S
        while view[slot] < count:
            if time.perf_counter() > deadline:
                raise RuntimeError(
                    f"rank {rank} of the group never told when it made call #{count}"
                )
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, LONGEST_NAP_S)
        return view[slot + 1] if view[slot] == count else 0.0


class Wire:
    """Holds back the transfers of one rank in one group; collectives of a group end in order."""

    def __init__(
        self, port: Port, store: dist.Store, ranks: tuple[int, ...], rank: int, timeout: timedelta
    ) -> None:
        self.port, self._ranks, self._rank = port, ranks, rank
        self._clock = Clock(store, rank, len(ranks), timeout.total_seconds())
        self._slowest = port.link.slowest(ranks)
        self._lanes: dict[object, queue.SimpleQueue] = {}

    def carry(self, work: Work, record: Record, result: Any) -> Work:
        """A work that ends when the modelled wire has delivered what `work` really moves."""
        delayed = LinkWork()
        if record.op == "send":
            arrival = self._send(record)
        elif record.op == "recv":
            arrival = self._recv(record, work, delayed)
        else:
            arrival = self._collective(record)
        self._lane(record.stream).put((work, arrival, delayed, result))
        return delayed

    def _collective(self, record: Record) -> Callable[[], float]:
        called_s, count = time.perf_counter(), record.seq
        seconds = time_s(record.op, record.nbytes, len(self._ranks), self._slowest)

        def arrival() -> float:
            ready_s = max(called_s, self.port.free_at("send", "recv"))
            self._clock.tell(0, count, ready_s)
            start_s = max(self._clock.ask(peer, 0, count) for peer in range(len(self._ranks)))
            return self.port.take(start_s, seconds, "send", "recv")

        return arrival

    def _send(self, record: Record) -> Callable[[], float]:
        """The sender is done when the last byte has left."""
        peer = self._ranks.index(record.peer or 0)
        seconds = record.nbytes / self._link_to(peer).bandwidth
        left_s = self.port.take(time.perf_counter(), seconds, "send")
        self._clock.tell(1 + peer, record.seq, left_s - seconds)
        return lambda: left_s

    def _recv(self, record: Record, work: Work, delayed: LinkWork) -> Callable[[], float]:
        """The receiver is done when the last byte is in: its way in may be busy with others."""

        def arrival() -> float:
            known = record.peer is not None
            peer = self._ranks.index(record.peer) if known else work._source_rank()
            delayed.source = peer
            link = self._link_to(peer)
            sent_s = self._clock.ask(peer, 1 + self._rank, record.seq) if known else 0.0
            first_byte_s = (sent_s or time.perf_counter()) + link.latency_s
            return self.port.take(first_byte_s, record.nbytes / link.bandwidth, "recv")

        return arrival

    def _link_to(self, peer: int) -> Link:
        return self.port.link.between(self._ranks[self._rank], self._ranks[peer])

    def __del__(self) -> None:
        for lane in getattr(self, "_lanes", {}).values():
            lane.put(None)  # ends its thread

    def _lane(self, stream: object) -> queue.SimpleQueue:
        """Works of one stream end in order, each stream on a thread of its own."""
        if stream not in self._lanes:
            lane = self._lanes[stream] = queue.SimpleQueue()
            threading.Thread(target=_deliver, args=(lane,), daemon=True).start()
        return self._lanes[stream]


def _deliver(lane: queue.SimpleQueue) -> None:
    while (transfer := lane.get()) is not None:
        work, arrival, delayed, result = transfer
        error = None
        try:
            work.wait()
            left_s = arrival() - time.perf_counter()
            if left_s > 0:
                time.sleep(left_s)
        except BaseException as caught:
            error = caught
        delayed.finish(result, error)
        del transfer, work, arrival, delayed, result  # their tensors end with their user's
