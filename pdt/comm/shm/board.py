"""What the ranks of a shared-memory group tell each other: counters, the call they are in, a pid.

Each rank writes only in the header of its own segment and reads those of its peers, so no word has
two writers and nothing needs an atomic operation.

Memory ordering. A rank first writes its data, then raises a counter, then its `EPOCH` word, then
wakes the sleepers. A peer that has seen the counter reads the data. This is sound because (1) the
stores stay in this order and so do the peer's loads: `fence()` stands between data and counter on
both sides, and x86 keeps that order by itself; (2) an aligned 8-byte store by a memoryview is one
instruction, never torn; (3) no wake-up is lost: a sleeper passes the epoch it read *before* it
looked at the counters, and the kernel compares it again under the lock that the waker takes.
"""

import os
import select
import threading
from collections.abc import Sequence

import torch

from pdt.comm.shm.futex import X86, fence, sleep, wake
from pdt.segment import Segment

# Words of 8 bytes; the busy ones have cache lines of their own.
_EPOCH, _PHASE, _ASLEEP, _PID, _FAILED = 0, 8, 16, 24, 25
_MAIL = 32  # then, for each peer, how many letters were put for it, and how many taken from it
_TEXT_NBYTES = 384
_LOOKS = 20  # before sleeping; each gives the core to whoever wants it


def _first_call_word(world_size: int) -> int:
    return _MAIL + 2 * world_size


def header_nbytes(world_size: int) -> int:
    """Bytes of a header: counters and two calls, in whole pages."""
    call_nbytes = _TEXT_NBYTES + 16 * world_size
    return -(-(8 * _first_call_word(world_size) + 2 * call_nbytes) // 4096) * 4096


class Board:
    """The headers of all ranks, as `rank` sees them.

    `phase` counts this rank's arrivals in collectives. Between two calls it is the same on all
    ranks: a call arrives equally often everywhere, or fails everywhere at its first arrival.
    """

    def __init__(self, segments: Sequence[Segment], rank: int) -> None:
        self.rank, self.world_size = rank, len(segments)
        self.peers = [q for q in range(self.world_size) if q != rank]
        self._addresses = [s.tensor(torch.uint8, 8).data_ptr() for s in segments]
        nbytes = header_nbytes(self.world_size)
        self._bytes = [memoryview(s.buffer)[:nbytes] for s in segments if s.buffer is not None]
        self._words = [header.cast("q") for header in self._bytes]
        self._own = self._words[rank]
        self._barrier = threading.Lock()
        self.phase = self._epoch = self.calls = 0
        self._asleep_on: list[tuple[int, int]] = []
        self._own[_PID] = os.getpid()

    def _publish(self, word: int, value: int) -> None:
        fence()
        self._own[word] = value
        self._epoch += 1
        self._own[_EPOCH] = self._epoch
        if not X86:
            wake(self._addresses[self.rank])
            return
        # The common case is that nobody sleeps, and a look costs less than a call of the kernel.
        # Between the store of the epoch and the look stands a full barrier: taking a lock.
        with self._barrier:
            pass
        for q in self.peers:
            if self._words[q][_ASLEEP]:
                wake(self._addresses[self.rank])
                return

    def arrive(self) -> None:
        """Tell the peers that this rank has come to the next arrival of the call."""
        self.phase += 1
        self._publish(_PHASE, self.phase)

    def late(self) -> list[int]:
        """The peers that have not come as far as this rank."""
        phase, words = self.phase, self._words
        late = [q for q in self.peers if words[q][_PHASE] < phase]
        if not late:
            fence()
        return late

    def late_after_looking(self) -> list[int]:
        """Like `late`, but looks a few times: it is cheaper than to sleep and be woken."""
        for _ in range(_LOOKS):
            if not (late := self.late()):
                return late
            os.sched_yield()
        return self.late()

    def announce(self, text: str, counts: Sequence[int] = ()) -> None:
        """Write down the call this rank is about to make: `text`, and 2 counts per rank, if any."""
        # There is room for two: a peer may still read the last while this rank writes the next.
        self.calls += 1
        start = self._call_start()
        end = start + _TEXT_NBYTES
        self._bytes[self.rank][start:end] = text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b" ")
        for i, count in enumerate(counts):
            self._own[end // 8 + i] = count

    def _call_start(self) -> int:
        call_nbytes = _TEXT_NBYTES + 16 * self.world_size
        return 8 * _first_call_word(self.world_size) + self.calls % 2 * call_nbytes

    def compare(self) -> None:
        """Raise RuntimeError, on every rank alike, unless all have announced the same text."""
        start = self._call_start()
        texts = [header[start : start + _TEXT_NBYTES] for header in self._bytes]
        if all(text == texts[self.rank] for text in texts):
            return
        said = [str(text, "utf-8", "replace").rstrip() for text in texts]
        lines = "".join(f"\n  rank {rank}: {text}" for rank, text in enumerate(said))
        raise RuntimeError(
            f"call {self.calls} of this shared-memory group differs between the ranks, "
            f"and must not:{lines}"
        )

    def counts(self, rank: int) -> tuple[list[int], list[int]]:
        """The two lists of counts by rank that `rank` announced with the present call."""
        start, n = (self._call_start() + _TEXT_NBYTES) // 8, self.world_size
        counts = self._words[rank][start : start + 2 * n].tolist()
        return counts[:n], counts[n:]

    def mail_put(self, src: int, dst: int) -> int:
        """How many letters `src` has put for `dst`."""
        put = self._words[src][_MAIL + dst]
        fence()
        return put

    def mail_taken(self, src: int, dst: int) -> int:
        """How many letters of `src` have been taken by `dst`."""
        taken = self._words[dst][_MAIL + self.world_size + src]
        fence()
        return taken

    def put_mail(self, dst: int) -> None:
        """Tell `dst` that one more letter lies ready."""
        word = _MAIL + dst
        self._publish(word, self._own[word] + 1)

    def take_mail(self, src: int) -> None:
        """Tell `src` that its oldest letter has been read and its place is free."""
        word = _MAIL + self.world_size + src
        self._publish(word, self._own[word] + 1)

    def epochs(self) -> list[int]:
        """A mark for `sleep`: taken before one looks whether there is something to do."""
        return [words[_EPOCH] for words in self._words]

    def sleep(self, peers: Sequence[int], epochs: list[int], attempt: int) -> bool:
        """Wait until one of `peers` has published since `epochs`; False if none did for a while."""
        self._asleep_on = [(self._addresses[q], epochs[q]) for q in peers]
        self._own[_ASLEEP] = 1
        sleep(self._asleep_on, attempt)
        self._own[_ASLEEP] = 0
        self._asleep_on = []
        return any(self._words[q][_EPOCH] != epochs[q] for q in peers)

    def nudge(self) -> None:
        """Wake the thread of this process that is in `sleep`: there is something new to do."""
        for address, _ in self._asleep_on:
            wake(address)

    def give_up(self) -> None:
        """Tell the peers that this rank's group has failed, so that they need not wait for it."""
        self._publish(_FAILED, 1)

    def lost(self, peers: Sequence[int]) -> dict[int, str]:
        """Those of `peers` for whom it is in vain to wait, and why."""
        why = {q: f"rank {q} gave up or left the group" for q in peers if self._words[q][_FAILED]}
        dead = [q for q in peers if not _is_alive(self._words[q][_PID])]
        return why | {q: f"rank {q} has died" for q in dead}


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but not yet reaped by its parent does not."""
    if pid == 0:  # it has not written its pid yet
        return True
    try:
        if not hasattr(os, "pidfd_open"):
            os.kill(pid, 0)
            return True
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        return not ended.poll(0)
    finally:
        os.close(descriptor)
