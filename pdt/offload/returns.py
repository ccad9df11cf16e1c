"""Parameters on their way back to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from pdt.offload.bus import Bus, Pair, Transfer
from pdt.offload.host_bucket import HostBucket
from pdt.offload.late import TIMEOUT_S

UNDER_WAY = 2  # buckets at once
Update = tuple[HostBucket, Sequence[int], list[Pair]]  # which parameters, and what is to return
Return = tuple[HostBucket, Sequence[int], Transfer]


class Returns:
    """What each bucket's `step` gives, from when it is asked for until it has been waited for.

    `arrived` is called then, with the bucket and which of its parameters are new.
    """

    def __init__(self, bus: Bus, arrived: Callable[[HostBucket, Sequence[int]], None]) -> None:
        self._bus, self._arrived = bus, arrived
        self._coming: dict[HostBucket, Future[Return]] = {}
        self._on_the_bus: deque[Transfer] = deque()

    def __contains__(self, bucket: HostBucket) -> bool:
        return bucket in self._coming

    def send(self, update: Update) -> Return:
        """Begin to carry them, in whatever thread, when less than two buckets are on their way."""
        bucket, params, pairs = update
        while len(self._on_the_bus) >= UNDER_WAY:
            self._on_the_bus.popleft().finish()
        transfer = self._bus.to_device(pairs)
        self._on_the_bus.append(transfer)
        bucket.returning(transfer)
        return bucket, params, transfer

    def expect(self, bucket: HostBucket, coming: Future[Return] | Return) -> None:
        """They have been sent, or somebody will send them."""
        if not isinstance(coming, Future):
            sent = coming
            coming = Future()
            coming.set_result(sent)
        self._coming[bucket] = coming

    def wait_for(self, bucket: HostBucket) -> None:
        """If they are on their way; raises what has kept them."""
        coming = self._coming.pop(bucket, None)
        if coming is not None:
            _, params, transfer = coming.result(TIMEOUT_S)
            transfer.wait()
            self._arrived(bucket, params)

    def wait_for_all(self) -> None:
        for bucket in list(self._coming):
            self.wait_for(bucket)
