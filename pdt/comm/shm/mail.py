"""Point-to-point messages of a shared-memory group.

For each peer a rank has a small ring of letters in its own segment. A message is one letter or
many, and each tells tag, bytes and dtype of the whole. A send is complete once its last letter lies
in the ring: a short message at once, a long one when the receiver has taken most of it.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pdt.comm.shm.board import Board
from pdt.comm.shm.steps import place
from pdt.comm.shm.work import Steps
from pdt.segment import Segment

_LETTERS = 4
_HEAD_NBYTES = 64  # words: tag, bytes of the message, its dtype's index
_copy = ctypes.memmove
_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def ring_nbytes(letter_nbytes: int) -> int:
    """Bytes of one ring."""
    return _LETTERS * (_HEAD_NBYTES + letter_nbytes)


@dataclass(eq=False)
class Receipt:
    """A receive: into the 1-D `target`, from `src` (None: from anyone); `source` once matched."""

    target: torch.Tensor
    tag: int
    src: int | None
    source: int = -1
    complete: bool = False
    error: str = ""

    def fits(self, src: int, tag: int) -> bool:
        """Whether this receive still waits for a message with `tag` from `src`."""
        return self.source < 0 and self.tag == tag and self.src in (None, src)


class _Message:
    """A message that comes from `src`: into the target of its receipt, else into a buffer."""

    def __init__(self, src: int, tag: int, nbytes: int, dtype: torch.dtype) -> None:
        self.src, self.tag, self.nbytes, self.dtype = src, tag, nbytes, dtype
        self.filled = 0
        self.receipt: Receipt | None = None
        self.buffer: torch.Tensor | None = None

    def claim(self, receipt: Receipt) -> None:
        """Give the message to a receive, which must expect just this size and dtype."""
        self.receipt, receipt.source = receipt, self.src
        target = receipt.target
        if (self.dtype, self.nbytes) != (target.dtype, place(target)[1]):
            receipt.error = (
                f"rank {self.src} sent {self.nbytes} bytes of {self.dtype} (tag {self.tag}), but "
                f"the receive expects {place(target)[1]} bytes of {target.dtype}"
            )
        elif self.buffer is None:
            self.buffer = target
        else:
            _copy(target.data_ptr(), self.buffer.data_ptr(), self.nbytes)

    def fill(self, address: int, nbytes: int) -> None:
        """Add the next letter."""
        if self.buffer is None:
            self.buffer = torch.empty(self.nbytes, dtype=torch.uint8)
        _copy(self.buffer.data_ptr() + self.filled, address, nbytes)
        self.filled += nbytes


class Mail:
    """Sends and receives of one rank; rings start at byte `start` of each segment."""

    def __init__(
        self, board: Board, segments: Sequence[Segment], start: int, letter_nbytes: int
    ) -> None:
        self._board, self._letter_nbytes = board, letter_nbytes
        nbytes = ring_nbytes(letter_nbytes)
        self._rings = [
            [s.tensor(torch.uint8, nbytes, start + dst * nbytes) for dst in range(len(segments))]
            for s in segments
        ]
        self._coming: dict[int, _Message] = {}
        self._unclaimed: list[_Message] = []
        self._receipts: list[Receipt] = []

    def _letter(self, src: int, dst: int, number: int) -> torch.Tensor:
        nbytes = _HEAD_NBYTES + self._letter_nbytes
        return self._rings[src][dst][number % _LETTERS * nbytes :][:nbytes]

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Steps:
        """Put the 1-D `tensor` into the ring for `dst`."""
        board, rank, step = self._board, self._board.rank, self._letter_nbytes
        address, nbytes = place(tensor)
        for offset in range(0, max(nbytes, 1), step):
            while board.mail_put(rank, dst) - board.mail_taken(rank, dst) >= _LETTERS:
                yield [dst]
            letter = self._letter(rank, dst, board.mail_put(rank, dst))
            head = torch.tensor([tag, nbytes, _DTYPES.index(tensor.dtype)])
            letter[:24].view(torch.int64).copy_(head)
            _copy(letter.data_ptr() + _HEAD_NBYTES, address + offset, min(step, nbytes - offset))
            board.put_mail(dst)

    def receive(self, receipt: Receipt) -> Steps:
        """Fill the target of `receipt`; ValueError if the message has another size or dtype."""
        for message in self._unclaimed:
            if receipt.fits(message.src, message.tag):
                message.claim(receipt)
                self._unclaimed.remove(message)
                receipt.complete = True
                break
        self._receipts.append(receipt)
        sources = self._board.peers if receipt.src is None else [receipt.src]
        while not receipt.complete:
            for src in sources:
                self._take_letters(src)
            if not receipt.complete:
                yield sources
        self._receipts.remove(receipt)
        if receipt.error:
            raise ValueError(receipt.error)

    def _receipt_for(self, src: int, tag: int) -> Receipt | None:
        return next((r for r in self._receipts if r.fits(src, tag)), None)

    def _take_letters(self, src: int) -> None:
        """Take what lies in the ring of `src`, if some receive may want it or what is behind it."""
        board, rank = self._board, self._board.rank
        while board.mail_put(src, rank) > (taken := board.mail_taken(src, rank)):
            letter = self._letter(src, rank, taken)
            message = self._coming.get(src)
            if message is None:
                if not any(r.source < 0 and r.src in (None, src) for r in self._receipts):
                    return
                tag, nbytes, dtype = letter[:24].view(torch.int64).tolist()
                message = self._coming[src] = _Message(src, tag, nbytes, _DTYPES[dtype])
                if receipt := self._receipt_for(src, tag):
                    message.claim(receipt)
            left = message.nbytes - message.filled
            message.fill(letter.data_ptr() + _HEAD_NBYTES, min(left, self._letter_nbytes))
            board.take_mail(src)
            if message.filled == message.nbytes:
                self._close(message)

    def _close(self, message: _Message) -> None:
        """The last letter has come."""
        del self._coming[message.src]
        if message.receipt is None and (r := self._receipt_for(message.src, message.tag)):
            message.claim(r)
        if message.receipt is None:
            self._unclaimed.append(message)
        else:
            message.receipt.complete = True
