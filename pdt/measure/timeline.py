"""What every rank did and when: spans in lanes, their overlap, and a trace to look at.

A rank has one lane for compute and one for each direction of communication. One that offloads has
more: the bus to its host and back, the host's own work, and reads and writes of files. All times
are those of `time.perf_counter` in seconds; on Linux that clock counts from the start of the
machine, so the spans of all ranks of one machine share it and can be merged as they are.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pdt.measure import intervals, trace
from pdt.measure.trace import LANES, TRANSFERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Transfer(Protocol):
    """What `from_records` reads of a meter's record; times are None while it has not ended."""

    op: str
    nbytes: int
    start_s: float | None
    end_s: float | None
    peer: int | None


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that a rank did: `name`, from `start_s` to `end_s`, in one of `LANES`.

    `kind` groups spans for colours and sums ("forward", "backward", "optimizer", "all_reduce").
    Raises ValueError for an unknown lane and for a span that ends before it starts.
    """

    name: str
    start_s: float
    end_s: float
    lane: str = "compute"
    kind: str = "other"
    rank: int = 0
    nbytes: int | None = None

    def __post_init__(self) -> None:
        if self.lane not in LANES:
            raise ValueError(f"span {self.name!r}: lane={self.lane!r} is none of {LANES}")
        if not self.end_s >= self.start_s:  # so that NaN is refused too
            raise ValueError(
                f"span {self.name!r}: end_s={self.end_s} lies before start_s={self.start_s}"
            )

    def __lt__(self, other: "Span") -> bool:
        return self._order() < other._order()

    def _order(self) -> tuple[float, float, int, int, str]:
        return (self.start_s, self.end_s, self.rank, LANES.index(self.lane), self.name)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Timeline:
    """The spans of one or more ranks; a rank records its own with `span`.

    Every sum is a dict by rank, in seconds, over the ranks that have a span; a moment covered by
    two spans of a lane counts once. `skipped` counts the records that had not ended. Picklable,
    and equal to another with the same spans in whatever order.
    """

    def __init__(self, spans: Iterable[Span] = (), *, rank: int = 0, skipped: int = 0) -> None:
        self.spans = list(spans)
        self.rank = rank
        self.skipped = skipped

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        return sorted(self.spans) == sorted(other.spans)

    __hash__ = None  # type: ignore[assignment]  # it grows, so it is no key

    def __repr__(self) -> str:
        return f"Timeline({len(self.spans)} spans of ranks {self.ranks})"

    @classmethod
    def merge(cls, timelines: Iterable["Timeline"]) -> "Timeline":
        """One timeline with the spans of all, sorted by start."""
        parts = list(timelines)
        spans = sorted(span for part in parts for span in part.spans)
        return cls(spans, skipped=sum(part.skipped for part in parts))

    @classmethod
    def from_records(cls, records: Iterable[Transfer], rank: int) -> "Timeline":
        """The timeline of a meter's records on `rank`.

        `send` occupies the send lane and `recv` the recv lane; a collective occupies both for its
        whole time, since the record does not tell its directions apart.
        """
        timeline = cls(rank=rank)
        for record in records:
            if record.start_s is None or record.end_s is None:
                timeline.skipped += 1
                continue
            for lane in (record.op,) if record.op in LANES else ("send", "recv"):
                timeline.spans.append(
                    Span(
                        name=_name(record),
                        start_s=record.start_s,
                        end_s=record.end_s,
                        lane=lane,
                        kind=record.op,
                        rank=rank,
                        nbytes=record.nbytes,
                    )
                )
        return timeline

    @contextmanager
    def span(
        self,
        name: str,
        *,
        kind: str | None = None,
        lane: str = "compute",
        nbytes: int | None = None,
    ) -> Iterator[None]:
        """Record the time of the `with` block, also when it raises; `kind` defaults to `name`.

        It is the time of the host: on CUDA, synchronise inside the block to include the kernels.
        """
        start_s = time.perf_counter()
        try:
            yield
        finally:
            end_s = time.perf_counter()
            self.spans.append(Span(name, start_s, end_s, lane, kind or name, self.rank, nbytes))

    @property
    def ranks(self) -> list[int]:
        return sorted({span.rank for span in self.spans})

    def between(self, start_s: float, end_s: float) -> "Timeline":
        """The spans that touch this stretch of time, whole."""
        spans = [s for s in self.spans if s.start_s <= end_s and s.end_s >= start_s]
        return Timeline(spans, rank=self.rank)

    def busy(self, lane: str) -> dict[int, float]:
        """Seconds during which the lane is occupied, by rank."""
        if lane not in LANES:
            raise ValueError(f"lane={lane!r} is none of {LANES}")
        return {rank: intervals.length(self._lanes(rank, lane)) for rank in self.ranks}

    def overlap(self) -> dict[int, float]:
        """Seconds during which both compute and a transfer (of any lane) run, by rank."""
        return {
            rank: intervals.length(
                intervals.intersection(self._lanes(rank, "compute"), self._lanes(rank, *TRANSFERS))
            )
            for rank in self.ranks
        }

    def exposed(self) -> dict[int, float]:
        """Seconds of transfers that no compute covers, by rank: what overlap may still save."""
        return {
            rank: intervals.length(
                intervals.difference(self._lanes(rank, *TRANSFERS), self._lanes(rank, "compute"))
            )
            for rank in self.ranks
        }

    def save(self, path: str | Path) -> None:
        """Write Chrome's trace-event JSON, which https://ui.perfetto.dev opens (see `trace`)."""
        trace.write(Path(path), self.spans)

    @classmethod
    def load(cls, path: str | Path) -> "Timeline":
        """Read what `save` wrote; times come back to within a nanosecond."""
        return cls(Span(**fields) for fields in trace.read(Path(path)))

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw all ranks in one picture, one row per rank and lane; returns the axes."""
        from pdt.measure import plot

        return plot.timeline(ax, self)

    def _lanes(self, rank: int, *lanes: str) -> list[intervals.Interval]:
        return [(s.start_s, s.end_s) for s in self.spans if s.rank == rank and s.lane in lanes]


def _name(record: Transfer) -> str:
    arrows = {"send": "to", "recv": "from"}
    if record.op in arrows and record.peer is not None:
        return f"{record.op} {arrows[record.op]} {record.peer}"
    return record.op
