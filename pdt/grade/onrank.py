"""The part that runs in a rank: load the learner's code, watch it run, send back plain data.

`prepare` comes first and knows nothing of the learner: each rank keeps its own inputs and forgets
the others', so no code in a rank can look up what another holds. `perform` runs one trial.
"""

from __future__ import annotations

import pickle
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pdt.comm.meter import meter
from pdt.comm.record import Record
from pdt.grade import plain, poison
from pdt.grade.exercise import Seen
from pdt.grade.guard import Gate, watch

HERE = str(Path(__file__).parent)


class Stopped(Exception):
    """Ends a trial from within a rank: the kind of the end, then what there is to say of it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}\n{text}")


@dataclass(frozen=True)
class Bench:
    """What a rank needs for the trials of one exercise."""

    inputs: list[tuple]
    learner: bytes
    drive: Callable[..., Any]
    poison: tuple[str, ...]
    ledger: bool
    changes: Callable[[], list[str]]


_bench: list[Bench] = []  # lives in a rank's process, from one call to the next


def prepare(
    inputs_by_rank: list[bytes],
    learner: bytes,
    drive: Callable[..., Any],
    names: tuple[str, ...],
    ledger: bool,
    nbytes: int | None,
    folder: str | None,
) -> None:
    """Keep this rank's inputs and the learner's code, unopened; limit the rank's memory."""
    inputs = pickle.loads(inputs_by_rank[dist.get_rank()])
    for name in names:
        poison.resolve(name)
    if ledger:
        import pdt.measure.memory  # noqa: F401  (so that it is watched, too)
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)
    limit_data(nbytes)
    _bench[:] = [Bench(inputs, learner, drive, names, ledger, watch())]


def limit_data(nbytes: int | None) -> None:
    """Let this process take `nbytes` of private memory more than it has. Linux; else nothing.

    RLIMIT_DATA counts what a process can write to alone, so neither torch's libraries nor address
    space that is only reserved; an allocation over it raises an error that names itself.
    """
    if nbytes is None or sys.platform != "linux":
        return
    import resource

    status = Path("/proc/self/status").read_text()
    held = int(status.partition("VmData:")[2].split()[0]) * 1024
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = held + nbytes if hard == resource.RLIM_INFINITY else min(held + nbytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def perform(index: int) -> bytes:
    """Run trial `index` with the learner's code on this rank; what was seen, as bytes.

    Raises `Stopped` for whatever the learner's code does instead.
    """
    bench = _bench[0]
    args, changes = bench.inputs[index], bench.changes
    learner = _load(bench.learner)
    dist.barrier()  # all start together, and outside of what is counted
    with poison.poisoned(bench.poison), Gate() as gate, meter() as metered:
        with _ledger() if bench.ledger else nullcontext() as ledger:
            result, seconds = _drive(bench.drive, learner, args)
    if problem := gate.problem(metered.records):
        raise Stopped("bypassed", problem)
    if changed := changes():
        raise Stopped("patched", ", ".join(changed[:3]))
    seen = Seen(result, args, metered.records, seconds, ledger.peak() if ledger else {})
    return _pack(seen)


def _ledger() -> Any:
    from pdt.measure.memory import Ledger

    return Ledger()


def _load(blob: bytes) -> Any:
    try:
        learner = pickle.loads(blob)
    except BaseException as error:
        raise Stopped("raised", f"it cannot be loaded in a rank\n{_own_lines(error)}") from None
    if poison.is_unwritten(learner):
        raise Stopped("unwritten", "there is nothing in it yet")
    if taken_from := poison.lender(learner):
        raise Stopped("borrowed", taken_from)
    return learner


def _drive(drive: Callable[..., Any], learner: Any, args: tuple) -> tuple[Any, float]:
    start_s = time.perf_counter()
    try:
        result = drive(learner, *args)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the learner's, too
        if name := poison.poison_in(error):
            raise Stopped("poisoned", name) from None
        if poison.is_stub_error(error):
            raise Stopped("unwritten", "it raises NotImplementedError") from None
        raise Stopped("raised", _own_lines(error)) from None
    if result is Ellipsis:
        raise Stopped("unwritten", "it returns ...")
    return result, time.perf_counter() - start_s


def _own_lines(error: BaseException) -> str:
    """The traceback from the learner's first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(HERE):
        trace = trace.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    except Exception:  # an exception that cannot even say what it is
        return type(error).__name__


def _pack(seen: Seen) -> bytes:
    records = [list(astuple(record)) for record in seen.records]
    try:
        return plain.dumps([seen.result, seen.args, records, seen.seconds, seen.peak])
    except (TypeError, RecursionError) as error:
        raise Stopped("unreadable", str(error)) from None


def unpack(data: bytes) -> Seen:
    """What `perform` sent, in the grader's process."""
    result, args, records, seconds, peak = plain.loads(data)
    return Seen(result, args, [Record(*fields) for fields in records], seconds, peak)
