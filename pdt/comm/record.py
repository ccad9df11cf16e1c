"""What the meter writes down: one record per call, totals of them, and the recorder of a rank."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from pdt.measure.table import text_table

KEEP = 256  # the last calls of a rank that the watchdog can look back on


@dataclass(slots=True)
class Record:
    """One call of one rank on one group.

    `nbytes` is the payload (the tensor; for all_gather, reduce_scatter, all_to_all, gather and
    scatter all n pieces). `wire_nbytes` is what a rank sends for it under the algorithm that
    `pdt.comm.cost` states. `seq` counts from 1: the collectives of a group, or the sends (the
    receives) between one pair. `peer` is the global rank at the other end, or the root.
    `start_s` and `end_s` are `time.perf_counter()`, one clock for all ranks of a machine on Linux;
    `end_s` is None until the transfer is known to have ended: at once for a collective, for a send
    or a receive when somebody waits for it or asks. On NCCL both are the host's
    moments, when it has queued the transfer; the device's are for torch's profiler to tell.
    """

    op: str
    nbytes: int
    wire_nbytes: float
    group: str
    ranks: tuple[int, ...]
    seq: int
    shape: tuple[int, ...]
    dtype: str
    peer: int | None
    start_s: float
    end_s: float | None = None
    waiting: bool = False

    @property
    def group_size(self) -> int:
        return len(self.ranks)

    @property
    def label(self) -> str:
        """As errors and tables call it: `all_reduce #3`, `send #1 to 2`."""
        ends = {"send": " to ", "recv": " from "}.get(self.op)
        peer = f"{ends}{'any' if self.peer is None else self.peer}" if ends else ""
        return f"{self.op} #{self.seq}{peer}"

    @property
    def stream(self) -> tuple[str, str, int | None]:
        """What `seq` counts in: a group's collectives, or one direction between one pair."""
        if self.op in ("send", "recv"):
            return self.group, self.op, self.peer
        return self.group, "collective", None


@dataclass(frozen=True)
class Totals:
    """Sums over records."""

    calls: int = 0
    nbytes: int = 0
    wire_nbytes: float = 0.0


@dataclass(eq=False)  # two blocks that saw the same calls are still two
class Metered:
    """The records of one `with meter()` block, in the order of the calls."""

    records: list[Record] = field(default_factory=list)

    def total(self, op: str | None = None) -> Totals:
        """Calls and bytes of one operation, or of all."""
        chosen = [record for record in self.records if op in (None, record.op)]
        return Totals(
            len(chosen),
            sum(record.nbytes for record in chosen),
            sum(record.wire_nbytes for record in chosen),
        )

    def ops(self) -> list[str]:
        """The operations that were called, in the order of their first call."""
        return list(dict.fromkeys(record.op for record in self.records))

    def table(self) -> str:
        """One line per operation: calls, payload, bytes that this rank sends."""
        rows = [
            (op, t.calls, t.nbytes, round(t.wire_nbytes))
            for op in self.ops()
            if (t := self.total(op))
        ]
        total = self.total()
        rows.append(("all", total.calls, total.nbytes, round(total.wire_nbytes)))
        return text_table(("op", "calls", "nbytes", "wire_nbytes"), rows)

    def __len__(self) -> int:
        return len(self.records)


class Recorder:
    """A rank's flight recorder: always on, shared by all its groups."""

    def __init__(self) -> None:
        self.meters: list[Metered] = []
        self._recent: deque[Record] = deque(maxlen=KEEP)
        self._pending: dict[int, Record] = {}
        self._calls: Counter[tuple[str, str, int | None]] = Counter()
        self.calls_before: dict[tuple[str, str, int | None], int] = {}

    def start(self, record: Record) -> None:
        """Number the record and keep it until its end is known."""
        self._calls[record.stream] += 1
        record.seq = self._calls[record.stream]
        self._recent.append(record)
        self._pending[id(record)] = record
        for metered in self.meters:
            metered.records.append(record)
        record.start_s = time.perf_counter()

    def end(self, record: Record) -> None:
        """Stamp the first end that is reported; later ones are the same transfer seen again."""
        if record.end_s is None:
            record.end_s = time.perf_counter()
            self._pending.pop(id(record), None)

    def recent(self) -> list[Record]:
        return list(self._recent)

    def pending(self) -> list[Record]:
        return list(self._pending.values())

    def start_run(self) -> None:
        """Keep the counts of now, `calls_before`: a reader counts the calls of one run from 1."""
        self.calls_before = self.calls()

    def calls(self) -> dict[tuple[str, str, int | None], int]:
        """How many calls each stream has seen."""
        return dict(self._calls)
