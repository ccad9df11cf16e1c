"""The order in which units are gathered and reduced: recorded once, followed from then on.

Pure. A *call* is "gather unit u" or "reduce unit u". All ranks have the same script, and each makes
every call of it in its order: who wants a later one first takes part in those that he skips.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

GATHER, REDUCE = "gather", "reduce"


class Call(NamedTuple):
    """`kind` is GATHER or REDUCE, `unit` an index."""

    kind: str
    unit: int


class Script:
    """`calls` are None until a pass has been recorded; `log` are those of the present pass."""

    def __init__(self) -> None:
        self.calls: list[Call] | None = None
        self.log: list[Call] = []
        self._next = 0  # the call that has not been reached
        self._ahead = 0  # all gathers before this place have been started

    def begin(self) -> None:
        self.log, self._next, self._ahead = [], 0, 0

    def until(self, wanted: Call) -> Iterator[int] | None:
        """The places from here to the next such call; None when there is none ahead."""
        calls = self.calls or []
        try:
            place = calls.index(wanted, self._next)
        except ValueError:
            return None
        return self._through(place + 1)

    def rest(self) -> Iterator[int]:
        return self._through(len(self.calls or ()))

    def _through(self, end: int) -> Iterator[int]:
        while self._next < end:
            self._next += 1
            yield self._next - 1

    def gathers(self, place: int, prefetch: int) -> Iterator[int]:
        """The units whose gathers are to be started when `place` is reached: those up to it, and
        `prefetch` behind. Depends on the place alone, so it is the same on all ranks."""
        calls = self.calls or []
        behind = 0
        for at in range(place, len(calls)):
            if calls[at].kind != GATHER:
                continue
            behind += at > place
            if behind > prefetch:
                return
            if at >= self._ahead:
                self._ahead = at + 1
                yield calls[at].unit

    def learn(self, *, only_first: bool = False) -> None:
        """Follow the present pass from now on, if there is no script, or one that lacks a unit."""
        known = None if self.calls is None else {call.unit for call in self.calls}
        if known is None or not (only_first or {call.unit for call in self.log} <= known):
            self.calls = list(self.log)


def first_difference(logs: list[list[Call]]) -> list[Call | None]:
    """Each rank's call in the first place in which they differ, or nothing."""
    for place in range(max(map(len, logs), default=0)):
        calls = [log[place] if place < len(log) else None for log in logs]
        if len(set(calls)) > 1:
            return calls
    return []
