"""Who waits for whom: reads the ranks' recorders and says which call is missing. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pdt.comm.record import Record
from pdt.measure.table import text_table

Stream = tuple[str, str, int | None]  # what a record's `seq` counts in


@dataclass
class RankState:
    """What one rank says of itself: its last calls, those not ended, its main thread's stack."""

    recent: list[Record]
    pending: list[Record]
    stack: list[str]
    calls: dict[Stream, int] = field(default_factory=dict)
    calls_before: dict[Stream, int] = field(default_factory=dict)  # when this run started
    returned: bool = False

    @property
    def waits_in(self) -> Record | None:
        """The call whose end the rank sits and waits for; None while it computes."""
        return next((record for record in self.pending if record.waiting), None)

    def has_called(self, wanted: Record, caller: int) -> bool:
        """Whether this rank has made the call that `wanted`, made by `caller`, needs from it."""
        if wanted.op in ("send", "recv"):
            return self._messages(wanted, caller) >= wanted.seq
        own = next(
            (r for r in self.recent if r.stream == wanted.stream and r.seq == wanted.seq), None
        )
        if own is None:
            return self.calls.get(wanted.stream, 0) > wanted.seq
        return own.op == wanted.op

    def _messages(self, wanted: Record, caller: int) -> int:
        """How many calls this rank has made for the other end of the caller's sends or receives."""
        mirror = "recv" if wanted.op == "send" else "send"
        return sum(self.calls.get((wanted.group, mirror, peer), 0) for peer in (caller, None))


States = Mapping[int, RankState | None]  # by rank; None: it does not answer


def of_this_run(states: States) -> dict[int, RankState | None]:
    """The states with all calls counted from the start of the run, as a reader counts them.

    A call keeps the number of its counterparts: what only one side had made before still counts.
    """
    return {rank: state and _rebased(rank, state, states) for rank, state in states.items()}


def _rebased(rank: int, state: RankState, states: States) -> RankState:
    before = {stream: _made_before(rank, stream, states) for stream in state.calls}

    def counted(records: list[Record]) -> list[Record]:
        return [replace(r, seq=r.seq - before.get(r.stream, 0)) for r in records]

    calls = {stream: count - before[stream] for stream, count in state.calls.items()}
    recent, pending = counted(state.recent), counted(state.pending)
    return replace(state, recent=recent, pending=pending, calls=calls, calls_before={})


def _made_before(rank: int, stream: Stream, states: States) -> int:
    """How many calls of the stream all its sides had made before the run."""
    group, op, peer = stream
    sides = [(other, stream) for other in states]
    if op != "collective":
        mirror = (group, "recv" if op == "send" else "send", rank)
        sides = [(rank, stream)] + ([(peer, mirror)] if peer is not None else [])
    known = [(state, kept) for other, kept in sides if (state := states.get(other))]
    return min(state.calls_before.get(kept, 0) for state, kept in known if kept in state.calls)


def missing(rank: int, states: States) -> list[int]:
    """The ranks that have not made the call which `rank` waits in."""
    state = states[rank]
    wanted = state.waits_in if state else None
    if wanted is None:
        return []
    if _is_message(wanted):
        needed = [wanted.peer] if wanted.peer is not None else []
    else:
        needed = [*wanted.ranks]
    return [
        peer
        for peer in needed
        if peer != rank
        and (other := states[peer]) is not None
        and not other.has_called(wanted, rank)
    ]


def deadlocked(states: States) -> bool:
    """True when no rank can go on: each one still at work waits for a call that nobody will make.

    A rank that computes, or that does not answer, may yet make it; then this is False.
    """
    at_work = [rank for rank, state in states.items() if state is None or not state.returned]
    return bool(at_work) and all(missing(rank, states) for rank in at_work)


def alike(states: Mapping[int, RankState]) -> bool:
    """Whether nothing is in flight and every call has its counterparts on the other ranks.

    Groups that are not of all ranks, and receives from any source, count as not alike.
    """
    if any(state.pending for state in states.values()):
        return False
    for rank, state in states.items():
        for (group, op, peer), count in state.calls.items():
            if op == "collective":
                matching = [other.calls.get((group, op, None)) for other in states.values()]
            else:
                mirror = (group, "recv" if op == "send" else "send", rank)
                matching = [] if peer is None else [states[peer].calls.get(mirror)]
            if not matching or any(other != count for other in matching):
                return False
    return True


def _is_message(record: Record) -> bool:
    return record.op in ("send", "recv")


def verdict(states: States) -> list[str]:
    """One sentence per call that is waited in and not made, or made and not waited for."""
    waits: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, state in states.items():
        if state and (absent := missing(rank, states)):
            assert state.waits_in is not None
            waits.setdefault((state.waits_in.label, tuple(absent)), []).append(rank)
    sentences = [
        _sentence(label, absent, waiting, states) for (label, absent), waiting in waits.items()
    ]
    others = [find(rank, states) for find in (_dropped, _unequal) for rank in states]
    return sentences + [line for line in dict.fromkeys(others) if line]


def _unequal(rank: int, states: States) -> str:
    """A collective that all have called, each with a tensor of its own shape or dtype."""
    state = states[rank]
    wanted = state.waits_in if state else None
    if wanted is None or _is_message(wanted) or missing(rank, states):
        return ""
    passed: dict[str, list[int]] = {}
    for peer in wanted.ranks:
        other = states[peer]
        for record in other.recent if other is not None else ():
            if record.stream == wanted.stream and record.seq == wanted.seq:
                passed.setdefault(f"{record.shape} {record.dtype}", []).append(peer)
    if len(passed) < 2:
        return ""
    said = "; ".join(
        _say(ranks, f"passed {what}", f"passed {what}") for what, ranks in passed.items()
    )
    return f"{wanted.label}: {said}"


def _dropped(rank: int, states: States) -> str:
    """A message whose sender returned without waiting for it: gloo may have dropped it."""
    state = states[rank]
    wanted = state.waits_in if state else None
    if wanted is None or not _is_message(wanted) or wanted.peer is None:
        return ""
    other = states[wanted.peer]
    for record in other.pending if other is not None and other.returned else ():
        if _is_message(record) and record.op != wanted.op and record.peer == rank:
            return (
                f"rank {rank} waits in {wanted.label}: "
                f"rank {wanted.peer} has returned without waiting for its {record.label}"
            )
    return ""


def _sentence(label: str, absent: tuple[int, ...], waiting: list[int], states: States) -> str:
    doing: dict[tuple[str, str], list[int]] = {}
    for rank in absent:
        doing.setdefault(_instead(states[rank]), []).append(rank)
    instead = "; ".join(_say(ranks, *verbs) for verbs, ranks in doing.items())
    return f"{_say(waiting, 'waits', 'wait')} in {label}: {instead}"


def _instead(state: RankState | None) -> tuple[str, str]:
    """What a rank does in place of the call that others wait for: for one rank, for several."""
    if state is not None and state.returned:
        return "has returned without making that call", "have returned without making that call"
    if state is not None and state.waits_in is not None:
        return f"waits in {state.waits_in.label}", f"wait in {state.waits_in.label}"
    return "has not made that call", "have not made that call"


def _say(ranks: list[int], one: str, several: str) -> str:
    return f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {_join(ranks)} {several}"


def _join(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def table(states: States) -> str:
    """Rank, number of calls, the call it waits in with shape and peers, and for how long."""
    return text_table(
        ("rank", "calls", "is", "shape", "with ranks", "for"),
        [_row(rank, state) for rank, state in sorted(states.items())],
    )


def _row(rank: int, state: RankState | None) -> tuple:
    if state is None:
        return rank, "?", "not answering (stopped, or busy in C code)", "", "", ""
    calls = sum(state.calls.values())
    record = state.waits_in
    if record is None:
        return rank, calls, "returned" if state.returned else _place(state), "", "", ""
    others = [r for r in record.ranks if r != rank]
    peers = [record.peer] if _is_message(record) and record.peer is not None else others
    shape = f"{record.shape} {record.dtype}" if record.dtype else ""
    waited_s = time.perf_counter() - record.start_s
    return rank, calls, f"in {record.label}", shape, _join(peers), f"{waited_s:.1f} s"


def _place(state: RankState) -> str:
    """`running` and the innermost line of the learner's own code."""
    lines = learners_lines(state.stack)
    return f"running {lines[-1].strip().splitlines()[0]}" if lines else "running"


def places(states: States) -> list[str]:
    """Where in the learner's code the ranks are that still run, ranks at one place together."""
    at: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        if state and not state.returned and (lines := learners_lines(state.stack)):
            at.setdefault("".join(lines[-3:]).rstrip(), []).append(rank)
    return [f"{_say(ranks, 'is', 'are')} at\n{place}" for place, ranks in at.items()]


def learners_lines(stack: list[str]) -> list[str]:
    """The stack without the frames of this package's worker and of torch."""
    hidden = ("/pdt/ranks/", "/pdt/comm/", "/torch/", "<string>", "/threading.py")
    return [line for line in stack if not any(part in line.split("\n")[0] for part in hidden)]
