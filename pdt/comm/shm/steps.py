"""The collectives of a shared-memory group, as generators that yield the peers they wait for.

Every rank has two slots in its segment. A large tensor passes through them in pieces that stay in
the caches, so that main memory is read once and written once:

    put     a rank copies its piece to its slot
    arrive  and waits until all have
    take    then it reads what it wants straight from the slots of its peers.

One arrival per piece is enough: two slots take turns, and who has arrived at piece k - 1 has taken
piece k - 2, whose slot piece k needs. Across calls too, since every call arrives at least once.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch

from pdt.comm.shm.board import Board, header_nbytes
from pdt.comm.shm.reduce import Reduction
from pdt.comm.shm.work import Steps
from pdt.segment import Segment

_copy = ctypes.memmove  # lets other threads run, and costs less than a tensor's copy_
_ALIGN_NBYTES = 64
_WHOLE_NBYTES = 16384  # up to here each rank reduces all by itself: one meeting instead of two
_CACHED_NBYTES = 1 << 20  # two ranks have a core each: pieces that its own cache holds are faster
Place = tuple[int, int]  # address, bytes
_Put = Callable[[int, int], None]  # (piece, own slot)
_Take = Callable[[int, list[int]], None]  # (piece, slots of all ranks)


def place(tensor: torch.Tensor) -> Place:
    """Where the bytes of a contiguous tensor lie."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _piece(total: int, k: int, step: int) -> int:
    """The length of piece `k` of `total` cut in steps."""
    return max(0, min(step, total - k * step))


def _aligned(nbytes: int) -> int:
    return nbytes // _ALIGN_NBYTES * _ALIGN_NBYTES


def _slices(nbytes: int, parts: int) -> list[int]:
    """The bounds of `parts` about equal slices that begin on cache lines."""
    step = -(-nbytes // (parts * _ALIGN_NBYTES)) * _ALIGN_NBYTES
    return [min(i * step, nbytes) for i in range(parts + 1)]


def _overlap(a: Place, b: Place) -> bool:
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1]


class Collectives:
    """The collectives of `rank`, through slots of `slot_nbytes`."""

    def __init__(self, board: Board, segments: Sequence[Segment], slot_nbytes: int) -> None:
        self._board, self._slot_nbytes = board, slot_nbytes
        self.rank, self.world_size = board.rank, board.world_size
        start = header_nbytes(self.world_size)
        self._slots = [
            [s.tensor(torch.uint8, slot_nbytes, start + i * slot_nbytes) for s in segments]
            for i in range(2)
        ]
        self._addresses = [[slot.data_ptr() for slot in slots] for slots in self._slots]
        self._views: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._use = 0

    def _meet(self) -> Steps:
        """Arrive, and wait until all have."""
        self._board.arrive()
        while late := self._board.late_after_looking():
            yield late[:1]  # one is enough to sleep on: all are needed

    def _next_slots(self) -> list[int]:
        """Where the slots of all ranks lie that take their turn now."""
        self._use += 1
        return self._addresses[self._use % 2]

    def _typed(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The slots of all ranks that are in use, as 1-D tensors of `dtype`."""
        key = (self._use % 2, dtype)
        if key not in self._views:
            self._views[key] = [slot.view(dtype) for slot in self._slots[self._use % 2]]
        return self._views[key]

    def _run(
        self, text: str, pieces: int, put: _Put, take: _Take, counts: Sequence[int] = ()
    ) -> Steps:
        """Put, meet and take each piece; the first meeting compares what the ranks announced.

        With `counts` (bytes to and from each rank) the number of pieces follows from all of them.
        """
        self._board.announce(text, counts)
        k = 0
        while k == 0 or k < pieces:
            addresses = self._next_slots()
            put(k, addresses[self.rank])
            yield from self._meet()
            if k == 0:
                self._board.compare()
                pieces = self._check_counts(pieces) if counts else pieces
            take(k, addresses)
            k += 1

    def _check_counts(self, step: int) -> int:
        """The pieces of `step` bytes that the largest part takes; all ranks see the same counts."""
        counts = [self._board.counts(q) for q in range(self.world_size)]
        for src, (sent, _) in enumerate(counts):
            for dst, (_, expected) in enumerate(counts):
                if sent[dst] != expected[src]:
                    raise RuntimeError(
                        f"rank {src} sends {sent[dst]} bytes to rank {dst}, "
                        f"which expects {expected[src]}"
                    )
        return -(-max(max(sent) for sent, _ in counts) // step)

    def refuse(self, text: str, reason: str) -> Steps:
        """Raise on every rank: ValueError if all ranks are equally wrong, else what each called."""
        self._board.announce(f"{text}: {reason}")
        self._next_slots()  # as all others do, so that the slots in use stay the same everywhere
        yield from self._meet()
        self._board.compare()
        raise ValueError(f"{text}: {reason}")

    def barrier(self, text: str) -> Steps:
        """Come to the same point as all others."""
        return self._run(text, 1, lambda k, slot: None, lambda k, slots: None)

    def spread(self, text: str, source: Place, targets: Sequence[Place | None]) -> Steps:
        """Rank q's `source` goes to `targets[q]` of each rank, which is None if not wanted.

        `text` must determine all sizes, for the ranks agree on nothing but `text`.
        """
        step, (start, nbytes) = self._slot_nbytes, source
        largest = max([nbytes, *(target[1] for target in targets if target)])

        def put(k: int, slot: int) -> None:
            _copy(slot, start + k * step, _piece(nbytes, k, step))

        def take(k: int, slots: list[int]) -> None:
            for q, target in enumerate(targets):
                if target is not None:
                    origin = start + k * step if q == self.rank else slots[q]
                    _copy(target[0] + k * step, origin, _piece(target[1], k, step))

        return self._run(text, -(-largest // step), put, take)

    def deal(self, text: str, sources: Sequence[Place], targets: Sequence[Place]) -> Steps:
        """`sources[q]` goes to rank q, which gets it in its `targets[rank]`; any sizes."""
        step = _aligned(self._slot_nbytes // self.world_size)

        def put(k: int, slot: int) -> None:
            for q, (start, nbytes) in enumerate(sources):
                _copy(slot + q * step, start + k * step, _piece(nbytes, k, step))

        def take(k: int, slots: list[int]) -> None:
            for slot, (start, nbytes) in zip(slots, targets, strict=True):
                _copy(start + k * step, slot + self.rank * step, _piece(nbytes, k, step))

        counts = [nbytes for _, nbytes in [*sources, *targets]]
        return self._run(text, step, put, take, counts)

    def reduce_scatter(
        self, text: str, inputs: Sequence[torch.Tensor], output: torch.Tensor, reduce: Reduction
    ) -> Steps:
        """`output` of rank q becomes the reduction of all ranks' `inputs[q]`; all 1-D."""
        itemsize, rank = output.element_size(), self.rank
        step = _aligned(self._slot_nbytes // self.world_size)
        sources = [place(tensor) for tensor in inputs]
        # In place, a rank reads its own part from its slot too, so that nothing is overwritten.
        in_place = _overlap(place(output), sources[rank])

        def put(k: int, slot: int) -> None:
            for q, (start, nbytes) in enumerate(sources):
                if q != rank or in_place:
                    _copy(slot + q * step, start + k * step, _piece(nbytes, k, step))

        def take(k: int, slots: list[int]) -> None:
            first, offset = k * step // itemsize, rank * step // itemsize
            numel = _piece(output.numel(), k, step // itemsize)
            parts = [v[offset : offset + numel] for v in self._typed(output.dtype)]
            if not in_place:
                parts[rank] = inputs[rank][first : first + numel]
            reduce(parts, output[first : first + numel])

        largest = max(nbytes for _, nbytes in sources)
        return self._run(text, -(-largest // step), put, take)

    def all_reduce(
        self, text: str, tensor: torch.Tensor, reduce: Reduction, root: int | None = None
    ) -> Steps:
        """The 1-D `tensor` becomes the reduction, on all ranks or on `root` alone."""
        if self.world_size > 2 and place(tensor)[1] > _WHOLE_NBYTES:
            return self._all_reduce_sliced(text, tensor, reduce, root)
        return self._all_reduce_whole(text, tensor, reduce, root)

    def _all_reduce_whole(
        self, text: str, tensor: torch.Tensor, reduce: Reduction, root: int | None
    ) -> Steps:
        """Every rank reduces everything itself: one meeting for a piece instead of two."""
        (start, nbytes), step = place(tensor), min(self._slot_nbytes, _CACHED_NBYTES)
        step_numel = step // tensor.element_size()

        def put(k: int, slot: int) -> None:
            _copy(slot, start + k * step, _piece(nbytes, k, step))

        def take(k: int, slots: list[int]) -> None:
            if root not in (None, self.rank):
                return
            own = tensor[k * step_numel : (k + 1) * step_numel]
            parts = [slot[: own.numel()] for slot in self._typed(tensor.dtype)]
            if self.world_size <= 2:
                parts[self.rank] = own  # `own` may be input and output of a single operation
            reduce(parts, own)

        return self._run(text, -(-nbytes // step), put, take)

    def _all_reduce_sliced(
        self, text: str, tensor: torch.Tensor, reduce: Reduction, root: int | None
    ) -> Steps:
        """Each rank reduces its slice of each piece and leaves the result in its own slot."""
        self._board.announce(text)
        (start, nbytes), step, rank = place(tensor), self._slot_nbytes, self.rank
        itemsize = tensor.element_size()
        for offset in range(0, nbytes, step):
            address, piece = start + offset, min(step, nbytes - offset)
            bounds = _slices(piece, self.world_size)
            low, high = bounds[rank], bounds[rank + 1]
            slots = self._next_slots()
            _copy(slots[rank], address, low)  # a rank's own slice need not be in its slot
            _copy(slots[rank] + high, address + high, piece - high)
            yield from self._meet()
            if offset == 0:
                self._board.compare()
            parts = [v[low // itemsize : high // itemsize] for v in self._typed(tensor.dtype)]
            result = parts[rank]
            parts[rank] = tensor[(offset + low) // itemsize : (offset + high) // itemsize]
            reduce(parts, result)
            yield from self._meet()
            if root in (None, rank):
                for q, slot in enumerate(slots):
                    _copy(address + bounds[q], slot + bounds[q], bounds[q + 1] - bounds[q])
