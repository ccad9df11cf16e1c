"""Spans as Chrome's trace-event JSON, the format that the Perfetto viewer opens.

One process per rank, one thread per lane, one complete event ("X") per span; times are in
microseconds after the earliest span. Slices of one thread must nest, so spans of a lane that
overlap in part go to further threads of that lane ("send 2"). Format: "Trace Event Format",
Google, 2016; every viewer of it ignores the fields that it does not know.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdt.measure import intervals

if TYPE_CHECKING:
    from pdt.measure.timeline import Span

TRANSFERS = ("send", "recv", "to host", "to device", "read", "write")
LANES = ("compute", *TRANSFERS, "host")
USUAL = LANES[:3]  # that are shown also where nothing happens
_LANE_STRIDE = 100  # thread ids of one lane; a lane never shows that many overlapping spans


def write(path: Path, spans: Iterable["Span"]) -> None:
    """Write the spans of all ranks to `path`, sorted by start."""
    ordered = sorted(spans)
    origin_s = ordered[0].start_s if ordered else 0.0
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"origin_s": origin_s},
        "traceEvents": list(_events(ordered, origin_s)),
    }
    path.write_text(json.dumps(document, indent=None, separators=(",", ":")), encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    """The fields of each span that `write` wrote; raises ValueError for a trace of another kind."""
    document = json.loads(path.read_text(encoding="utf-8"))
    try:
        origin_s = document["otherData"]["origin_s"]
        return [_fields(e, origin_s) for e in document["traceEvents"] if e["ph"] == "X"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a trace that Timeline.save wrote: {error!r}") from error


def _events(spans: list["Span"], origin_s: float) -> Iterator[dict[str, Any]]:
    for rank in sorted({span.rank for span in spans}):
        yield _metadata("process_name", rank, 0, name=f"rank {rank}")
        yield _metadata("process_sort_index", rank, 0, sort_index=rank)
        for index, lane in enumerate(LANES):
            members = [span for span in spans if span.rank == rank and span.lane == lane]
            if not members and lane not in USUAL:
                continue
            numbers = intervals.tracks([(s.start_s, s.end_s) for s in members], nest=True)
            for number in range(max(numbers, default=0) + 1):
                thread = index * _LANE_STRIDE + number
                name = lane if number == 0 else f"{lane} {number + 1}"
                yield _metadata("thread_name", rank, thread, name=name)
                yield _metadata("thread_sort_index", rank, thread, sort_index=thread)
            for span, number in zip(members, numbers, strict=True):
                yield _slice(span, index * _LANE_STRIDE + number, origin_s)


def _metadata(event: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": rank, "tid": thread, "args": args}


def _slice(span: "Span", thread: int, origin_s: float) -> dict[str, Any]:
    args: dict[str, Any] = {"lane": span.lane}
    if span.nbytes is not None:
        args["nbytes"] = span.nbytes
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": span.rank,
        "tid": thread,
        "ts": (span.start_s - origin_s) * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": args,
    }


def _fields(event: dict[str, Any], origin_s: float) -> dict[str, Any]:
    start_s = origin_s + event["ts"] / 1e6
    return {
        "name": event["name"],
        "start_s": start_s,
        "end_s": start_s + event["dur"] / 1e6,
        "lane": event["args"]["lane"],
        "kind": event["cat"],
        "rank": event["pid"],
        "nbytes": event["args"].get("nbytes"),
    }
