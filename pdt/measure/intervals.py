"""Exact arithmetic on sets of half-open intervals `(start, end)`; the base of overlap figures.

Pure: only comparisons and one subtraction per piece, so integers and fractions stay exact and
floats lose nothing but the rounding of `end - start`.
"""

import math
from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as sorted, disjoint, non-touching intervals; empty ones vanish."""
    joined: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def intersection(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The points that lie both in `a` and in `b`."""
    left, right = union(a), union(b)
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The points of `a` that do not lie in `b`."""
    holes, rest = union(b), []
    first = 0
    for start, end in union(a):
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        for hole_start, hole_end in holes[first:]:
            if hole_start >= end:
                break
            if start < hole_start:
                rest.append((start, hole_start))
            start = max(start, hole_end)
        if start < end:
            rest.append((start, end))
    return rest


def length(intervals: Iterable[Interval]) -> float:
    """The measure of the union, so that a point covered twice counts once."""
    return math.fsum(end - start for start, end in union(intervals))


def tracks(intervals: list[Interval], *, nest: bool = False) -> list[int]:
    """A track number for each interval, the lowest at which it meets no other of that track.

    With `nest`, intervals of one track may also contain each other, as slices of a trace viewer
    do; without it they are disjoint.
    """
    order = sorted(range(len(intervals)), key=lambda i: (intervals[i][0], -intervals[i][1]))
    open_ends: list[list[float]] = []  # for each track, the ends of the intervals still open
    chosen = [0] * len(intervals)
    for i in order:
        start, end = intervals[i]
        admitting = (n for n, ends in enumerate(open_ends) if _admits(ends, start, end, nest))
        chosen[i] = next(admitting, len(open_ends))
        if chosen[i] == len(open_ends):
            open_ends.append([])
        open_ends[chosen[i]].append(end)
    return chosen


def _admits(ends: list[float], start: float, end: float, nest: bool) -> bool:
    while ends and ends[-1] <= start:
        ends.pop()
    return not ends or (nest and end <= ends[-1])
