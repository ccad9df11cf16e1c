"""Lesson 14's exercise on prediction: how long a walk through files takes, and what is stall."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Any

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial, Wrong
from pdt.grade.expect import expect_close

Parts = list[tuple[float, float, float]]  # seconds to read, use and write each item
READ, USE, WRITE = range(3)
REL = 1e-9


def _trials(dice: Dice) -> Iterator[Trial]:
    for count, k in ((1, 1), (4, 1), (1, 3), (6, 2), (6, 3), (9, 3), (7, 4), (5, 5), (4, 9)):
        buffers = f"{k} buffer{'s' * (k > 1)}, {count} item{'s' * (count > 1)}"
        each = (dice.integer(1, 9), dice.integer(1, 9), dice.integer(1, 9))
        yield Trial([([_seconds(*each)] * count, k)], f"{buffers} alike")
        if count > 1:
            parts = [_seconds(*(dice.integer(0, 9) for _ in range(3))) for _ in range(count)]
            yield Trial([(parts, k)], f"{buffers} that differ")
    yield Trial([([(0.01, 0.001, 0.05)] * 8, 2)], "a disk that writes slowly")


def _seconds(*milliseconds: int) -> tuple[float, ...]:
    return tuple(ms / 1000 for ms in milliseconds)


def simulate(parts: Parts, k: int) -> tuple[float, float]:
    """All seconds and those of stall, by events: three lanes, each with its queue, k buffers."""
    queues: list[deque[int]] = [deque(range(len(parts))), deque(), deque()]
    ends: list[tuple[float, int, int]] = []  # when, which lane, which item
    busy, free, now, idle_since, stall = [False] * 3, k, 0.0, 0.0, 0.0
    while any(queues) or ends:
        for lane in (WRITE, USE, READ):
            if queues[lane] and not busy[lane] and (lane != READ or free):
                item, busy[lane] = queues[lane].popleft(), True
                free -= lane == READ
                stall += now - idle_since if lane == USE else 0.0
                heapq.heappush(ends, (now + parts[item][lane], lane, item))
        now, lane, item = heapq.heappop(ends)
        busy[lane] = False
        if lane == USE:
            idle_since = now
        if lane == WRITE:
            free += 1
        else:
            queues[lane + 1].append(item)
    return now, stall


def _seen(run: Run, which: int) -> Any:
    result = run.ranks[0].result
    if type(result) not in (tuple, list) or len(result) != 2:
        raise Wrong("two numbers, all seconds and those of stall", repr(result)[:60])
    return result[which]


def _check(run: Run, which: int, what: str) -> None:
    seen, expected = _seen(run, which), simulate(*run.inputs[0])[which]
    if abs(expected) < REL and type(seen) in (int, float):
        seen, expected = seen + 1.0, expected + 1.0  # a share of nothing is nothing
    expect_close(seen, expected, REL, what)


def _with_one(run: Run) -> None:
    if run.inputs[0][1] == 1:
        _check(run, 0, "the seconds with one buffer")


def _with_many(run: Run) -> None:
    parts, k = run.inputs[0]
    if k >= len(parts):
        _check(run, 0, "the seconds with a buffer for each item")


def _with_few(run: Run) -> None:
    parts, k = run.inputs[0]
    if 1 < k < len(parts):
        _check(run, 0, f"the seconds with {k} buffers")


def _stalls(run: Run) -> None:
    _check(run, 1, "the seconds of stall")


WALK_TIME = Exercise(
    name="walk_time",
    points=2,
    minutes=15,
    trials=_trials,
    poison=("pdt.plan.infinity.walk_s", "pdt.plan.infinity.item_s"),
    properties=(
        Property(
            "is the sum of all parts with one buffer",
            _with_one,
            "item i cannot be read before item i - 1 has been written.",
        ),
        Property(
            "knows three lanes that work side by side",
            _with_many,
            "a lane begins an item when it has ended the one before and the item is there.",
        ),
        Property(
            "waits for a buffer to be written",
            _with_few,
            "item i is read into the buffer that item i - k has left.",
        ),
        Property(
            "counts what the user waits",
            _stalls,
            "from the end of a use, at first from 0, to the beginning of the next one.",
        ),
    ),
)
