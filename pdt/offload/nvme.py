"""Walking through what does not fit in the host's memory: states in files, a few of them at a time.

The *window* is the few buffers that there are (`items` has the other words): while one item is
used, those that come next are read ahead into others, and those before are written behind. So
ZeRO-Infinity steps states that lie on NVMe: Rajbhandari et al. 2021 (arXiv:2104.07857).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from pdt.measure.timeline import Span
from pdt.offload.files import TensorFiles
from pdt.offload.items import STALL, USE, Event, Item, spans
from pdt.offload.read_ahead import Ahead, ReadAhead

__all__ = ["Event", "Item", "SwapWindow"]


class SwapWindow:
    """Use `items` of `files` one after the other, with no more than `num_buffers` in memory.

    >>> window.plan(names)                       # what will be used, in this order
    >>> for name in names:
    ...     with window.item(name) as planes:    # has been read, and is written back after
    ...         step(planes["master"], planes["exp_avg"], planes["exp_avg_sq"], grad)

    Reading begins with `plan`, which may come long before the items are used. With one buffer
    nothing overlaps; with two, an item is read while another is used, and with three it is written
    meanwhile, too. An item is used by one thread at a time. Nobody else may touch the buffers, nor,
    until `close`, the files of the items.

    An exception inside `item` leaves its file as it was and gives up the plan. Errors of reading
    are raised by `item`, those of writing by whatever is called next.
    """

    def __init__(
        self, files: TensorFiles, items: Mapping[str, Item], *, num_buffers: int = 3
    ) -> None:
        if num_buffers < 1:
            raise ValueError(f"num_buffers={num_buffers}: at least one is needed")
        self.files, self.items, self.num_buffers = files, dict(items), num_buffers
        self._moves = ReadAhead(files, items, num_buffers)
        self._in_use: str | None = None

    def __enter__(self) -> SwapWindow:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        try:
            self.close()
        except Exception as late:
            if error is None:
                raise
            error.add_note(f"and, when the window was closed: {late}")

    @property
    def buffers(self) -> list[Tensor]:
        """The memory of the window."""
        return self._moves.buffers

    @property
    def nbytes(self) -> int:
        """Memory of all buffers: `num_buffers` times the largest item."""
        return sum(buffer.nbytes for buffer in self._moves.buffers)

    @property
    def live(self) -> int:
        """Buffers that are being read into, used, or written from."""
        return self._moves.live

    @property
    def peak_live(self) -> int:
        """The most that there were."""
        return self._moves.peak_live

    @property
    def events(self) -> deque[Event]:
        """Reads, uses, writes and stalls, as they ended; clear it to begin anew."""
        return self._moves.events

    @property
    def stall_s(self) -> float:
        """Seconds for which `item` has waited, since `events` was cleared."""
        return sum(e.end_s - e.start_s for e in list(self.events) if e.what == STALL)

    def spans(self, rank: int = 0) -> list[Span]:
        """Reads, writes and uses for a `Timeline`."""
        return spans(list(self.events), rank)

    def plan(self, names: Iterable[str]) -> None:
        """These are used next, in this order, after those planned already; begin to read them."""
        names = list(names)
        for name in names:
            self._check(name)
        self._moves.plan(names)

    @contextmanager
    def item(self, name: str, *, write: bool = True) -> Iterator[dict[str, Tensor]]:
        """The planes of the next item of the plan, or of any if nothing is planned.

        write: write them back after. Raises ValueError if the plan says another.
        """
        self._begin(name)
        try:
            ahead = self._arrived()
            start_s = time.perf_counter()
            try:
                yield self.items[name].views(self._moves.buffers[ahead.buffer])
            except BaseException:
                write = False
                raise
            finally:
                self._moves.note(USE, name, ahead.buffer, start_s, time.perf_counter())
                self._moves.release(name, ahead.buffer, write)
        except BaseException:
            self.drop()
            raise
        finally:
            self._in_use = None

    def put(self, name: str, planes: Mapping[str, Tensor]) -> None:
        """Write an item anew, behind; RuntimeError while anything is planned or used.

        Raises ValueError unless `planes` has each plane, of any shape with its numel.
        """
        self._check(name)
        if self._in_use is not None or self._moves.due() is not None:
            raise RuntimeError(f"put {name!r} while items are planned or used: drop() first")
        buffer, write = self._moves.free(), False
        try:
            self.items[name].fill(self._moves.buffers[buffer], planes)
            write = True
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
        finally:
            self._moves.release(name, buffer, write)

    def drop(self) -> None:
        """Give up what is planned; what has been read ahead is forgotten."""
        self._moves.drop()

    def drain(self) -> None:
        """Return when all that was written behind is in its file; raises what went wrong."""
        if self._in_use is not None:
            raise RuntimeError(f"drain while {self._in_use!r} is in use")
        self._moves.drain()

    def close(self) -> None:
        """`drop`, then `drain`. The files stay open, and the window may be used again."""
        self.drop()
        self.drain()

    def _begin(self, name: str) -> None:
        self._check(name)
        if self._in_use is not None:
            raise RuntimeError(f"{name!r} is asked for while {self._in_use!r} is in use")
        due = self._moves.due()
        if due is None:
            self.plan([name])
        elif due != name:
            raise ValueError(
                f"{name!r} is asked for, and the plan says {due!r}: drop() gives up the plan"
            )
        self._in_use = name

    def _arrived(self) -> Ahead:
        """What has been read for the next item of the plan, once it has."""
        start_s, was_ready = time.perf_counter(), self._moves.is_ready()
        ahead = self._moves.next()
        try:
            ahead.transfer.wait()
        except BaseException:
            self._moves.forget(ahead)
            raise
        if not was_ready:
            self._moves.note(STALL, ahead.name, ahead.buffer, start_s, time.perf_counter())
        return ahead

    def _check(self, name: str) -> None:
        if name not in self.items:
            raise ValueError(f"{name!r} is none of the window's {len(self.items)} items")
