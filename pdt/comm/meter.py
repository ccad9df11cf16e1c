"""A process group that counts: it hands every call to an inner group and records it.

torch sees an ordinary backend, so its own DistributedDataParallel, FSDP2, DTensor and pipelining
run on it unchanged, and one meter counts theirs and ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from pdt.comm.cost import wire_nbytes
from pdt.comm.payload import READERS, Payload, Reader
from pdt.comm.record import Metered, Record, Recorder


class Wire(Protocol):
    """Delays a transfer; `pdt.comm.link` has the one there is."""

    def carry(self, work: Work, record: Record, result: Any) -> Work: ...


class MeteredWork(Work):
    """The inner group's work; its end is stamped when it is seen."""

    def __init__(self, inner: Work, record: Record, recorder: Recorder) -> None:
        super().__init__()
        self._inner, self._record, self._recorder = inner, record, recorder
        self._future: torch.futures.Future | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._record.waiting = True
        try:
            return self._inner.wait() if timeout is None else self._inner.wait(timeout)
        finally:
            self._record.waiting = False
            self._recorder.end(self._record)

    def is_completed(self) -> bool:
        completed = self._inner.is_completed()
        if completed:
            self._recorder.end(self._record)
        return completed

    def get_future(self) -> torch.futures.Future:
        """Completes after the end has been stamped: who waits for it finds it in the record."""
        if self._future is None:
            record, recorder = self._record, self._recorder  # not self: it holds the future

            def stamp(ended: torch.futures.Future) -> Any:
                recorder.end(record)
                return ended.value()

            self._future = self._inner.get_future().then(stamp)
        return self._future

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def synchronize(self) -> None:
        self._inner.synchronize()

    def source_rank(self) -> int:
        return self._inner._source_rank()

    _source_rank = source_rank


class MeterGroup(dist.ProcessGroup):
    """Counts what passes to `inner`; `wire`, if given, delays it.

    `name` is torch's name of the group, `ranks` its members' global ranks. The methods that torch
    calls (`READERS` lists them) are added below the class.
    """

    def __init__(
        self,
        inner: Any,
        name: str,
        ranks: tuple[int, ...],
        recorder: Recorder,
        wire: Wire | None = None,
    ) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self.ranks, self.recorder, self.wire = inner, ranks, recorder, wire
        self._name = name

    def getBackendName(self) -> str:
        return "pdt"

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _carry(self, method: Callable[..., Work], what: Payload, args: tuple, kwargs: dict) -> Work:
        record = self._record(what)
        self.recorder.start(record)
        try:
            work = method(*args, **kwargs)
        except BaseException:
            self.recorder.end(record)
            raise
        if self.wire is not None:
            work = self.wire.carry(work, record, what.result)
        metered = MeteredWork(work, record, self.recorder)
        if what.is_collective and _may_be_waited_for_later(args, kwargs):
            metered.get_future()
        return metered

    def _record(self, what: Payload) -> Record:
        peer = None if what.peer is None else self.ranks[what.peer]
        sent = wire_nbytes(what.op, what.nbytes, len(self.ranks))
        return Record(
            what.op, what.nbytes, sent, self._name, self.ranks, 0, what.shape, what.dtype, peer, 0.0
        )


def _may_be_waited_for_later(args: tuple, kwargs: dict) -> bool:
    """False when torch says that the caller waits at once (async_op=False): no need of a callback,
    whose thread would fight for the interpreter lock with the caller's."""
    options = [*args[-1:], *kwargs.values()]
    return all(getattr(option, "asyncOp", True) for option in options)


def _metered(name: str, read: Reader) -> Callable[..., Work]:
    def method(self: MeterGroup, *args: Any, **kwargs: Any) -> Work:
        what = read(self.size(), args)
        return self._carry(getattr(self.inner, name), what, args, kwargs)

    method.__name__ = name
    return method


for _name, _read in READERS.items():
    if hasattr(dist.ProcessGroup, _name):  # the newer names are not in every torch
        setattr(MeterGroup, _name, _metered(_name, _read))


@contextmanager
def meter(group: dist.ProcessGroup | None = None) -> Iterator[Metered]:
    """Record this rank's calls, on every group, while the block runs.

    Each rank holds its own records. `group` finds the recorder (default: the default group); all
    groups of a rank share one. Blocks nest: each gets every record. Raises RuntimeError when the
    group does not count, that is when it was not made by `pdt.Ranks` or `pdt.comm.init`.
    """
    group = group or dist.group.WORLD
    if not isinstance(group, MeterGroup):
        raise RuntimeError(
            f"meter() needs a group that counts and this one is {type(group).__name__}: "
            "use pdt.Ranks, or pdt.comm.init(...) in place of dist.init_process_group(...)"
        )
    metered = Metered()
    group.recorder.meters.append(metered)
    try:
        yield metered
    finally:
        group.recorder.meters.remove(metered)
