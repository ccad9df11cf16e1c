"""Memory that the ranks of one machine map together, and the places where they wait for each other.

`board` and `segment` do the work underneath: counters in shared memory and sleeping on them.
"""

from __future__ import annotations

import os
import platform
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from pdt.comm.shm.board import Board, header_nbytes
from pdt.comm.shm.futex import fence
from pdt.flat import offsets
from pdt.segment import exchange

ALIGN_NUMEL = 64  # no vector of any dtype is wider

_PAGE_NBYTES = 4096
_LOOKS = 20  # before sleeping; each gives the core to whoever wants it
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine() -> tuple[str, str]:
    """The host's name, and what tells this machine from every other."""
    return platform.node(), _BOOT_ID.read_text() if _BOOT_ID.exists() else platform.node()


def common_key(group: dist.ProcessGroup | None, problem: str | None) -> str:
    """A new key, the same on all ranks; raises ValueError on every rank if one has a `problem`
    or if they are not on one machine, naming the ranks."""
    said: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (problem, *machine(), uuid.uuid4().hex), group=group)
    if wrong := [f"rank {rank}: {text}" for rank, (text, *_) in enumerate(said) if text]:
        raise ValueError("; ".join(wrong))
    if len({boot for _, _, boot, _ in said}) > 1:
        hosts = ", ".join(f"rank {rank} on {host}" for rank, (_, host, *_) in enumerate(said))
        raise ValueError(
            f"memory can be shared within one machine only, and there is {hosts}: pass group=, "
            "the ranks of this machine, or use DDP, a copy for each rank"
        )
    return f"shared/{said[0][3]}"


class NodeMemory:
    """One flat tensor for each (dtype, numel) of `wanted`, the same memory on all ranks, zeroed.

    The ranks `meet`, and pass `num_turns` things on from each rank to the next: rank r has its turn
    with thing i once rank r - 1 has passed it on. Waiting ends by a RuntimeError that names the
    ranks, after `timeout_s` or soon after a peer has died; the memory is of no use after that.
    Memory is committed when touched, and given back with the last rank, however that ends.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        key: str,
        wanted: Sequence[tuple[torch.dtype, int]],
        num_turns: int,
        timeout_s: float,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._timeout_s = timeout_s
        words_start = header_nbytes(self.world_size)
        starts = [_pages(words_start + 8 * num_turns)]
        for dtype, numel in wanted:
            starts.append(_pages(starts[-1] + numel * dtype.itemsize))
        segments = exchange(
            _get_default_store(), key, self.rank, self.world_size, starts[-1], timeout_s
        )
        self._board = Board(segments, self.rank)
        self._turns = [
            memoryview(s.buffer)[words_start : words_start + 8 * num_turns].cast("q")
            for s in segments
            if s.buffer is not None
        ]
        self.tensors: list[Tensor] = [
            segments[0].tensor(dtype, numel, start)
            for (dtype, numel), start in zip(wanted, starts, strict=False)
        ]
        self._segments = segments

    def meet(self, what: str) -> None:
        """Return when all ranks have come; raises on every rank unless all come for the same."""
        board = self._board
        board.announce(what)
        board.arrive()
        self._wait(board.late, what)
        board.compare()

    def take_turn(self, thing: int, number: int) -> bool:
        """Return when the rank before has passed `thing` on in round `number`: whether that rank
        or one before it has put something in."""
        if self.rank == 0:
            return False
        before, words = self.rank - 1, self._turns[self.rank - 1]

        def late() -> list[int]:
            return [before] if words[thing] >> 1 < number else []

        self._wait(late, f"turn {number} with parameter {thing}")
        fence()
        return bool(words[thing] & 1)

    def pass_on(self, thing: int, number: int, filled: bool) -> None:
        """Let the next rank have its turn; `filled`: there is something in it."""
        fence()
        self._turns[self.rank][thing] = 2 * number + filled
        self._board.put_mail((self.rank + 1) % self.world_size)

    def is_filled(self, thing: int) -> bool:
        """Whether any rank put something in, in the round that has ended."""
        return bool(self._turns[-1][thing] & 1)

    def give_up(self) -> None:
        """Tell the others that this rank will not come."""
        self._board.give_up()

    def _wait(self, late: Callable[[], list[int]], what: str) -> None:
        """Return when `late()` is empty."""
        for _ in range(_LOOKS):
            if not late():
                return
            os.sched_yield()
        board, attempt, end_s = self._board, 0, time.monotonic() + self._timeout_s
        while True:
            epochs = board.epochs()  # before looking, so that no news is slept through
            if not (peers := late()):
                return
            if board.sleep(peers, epochs, attempt):
                attempt = 0
                continue
            attempt += 1
            self._look_after(late, what, end_s)

    def _look_after(self, late: Callable[[], list[int]], what: str, end_s: float) -> None:
        """Nothing has happened for a while: raise if this rank waits in vain or for too long."""
        lost = self._board.lost(late())
        still = late()  # for they may have done their part before
        reasons = [lost[peer] for peer in still if peer in lost]
        if not reasons and still and time.monotonic() > end_s:
            reasons = [f"time-out, ranks {still} have not come"]
        if reasons:
            self.give_up()
            raise RuntimeError(f"shared parameters, {what}: {', '.join(reasons)}")


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES


def slice_cuts(numels: Sequence[int], world_size: int) -> list[int]:
    """Where the slices of `world_size` ranks begin in a flat buffer of parts with these sizes, and
    the end.

    Slices are equal up to `ALIGN_NUMEL` elements: a cut is moved down to a multiple of it, counted
    from its part's beginning. So vector instructions take the same elements together as they do in
    the whole part, and give the same bits (what is left over is not computed by vectors, and may
    be rounded otherwise).
    """
    starts = offsets(numels)
    cuts = []
    for rank in range(world_size):
        cut = starts[-1] * rank // world_size
        start = starts[bisect_right(starts, cut) - 1]
        cuts.append(cut - (cut - start) % ALIGN_NUMEL)
    return [*cuts, starts[-1]]


class Flat:
    """The parameters of one dtype, and the sums of their gradients (None if they are frozen)."""

    def __init__(self, params: Tensor, sums: Tensor | None, memory: NodeMemory) -> None:
        self.params, self.sums, self.memory = params, sums, memory
        self.cuts: list[int] = []
        self._version = 0

    def cut(self, numels: Sequence[int]) -> None:
        """Divide among the ranks."""
        self.cuts = slice_cuts(numels, self.memory.world_size)

    def mark(self) -> None:
        """The sums are complete: from here on nobody may change them."""
        self._version = self.sums._version if self.sums is not None else 0

    @property
    def is_changed(self) -> bool:
        """Whether somebody has changed the sums on this rank since `mark`."""
        return self.sums is not None and self.sums._version != self._version
