"""What lesson 06's arithmetic on a timeline must do: communication that no compute covers."""

from __future__ import annotations

from collections.abc import Iterator

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect_close
from pdt.measure import intervals

Spans = list[tuple[int, int]]
APART, PILED = "spans that do not overlap in their lane", "spans on top of each other"


def _trials(dice: Dice) -> Iterator[Trial]:
    """By hand: nothing, touching, inside, around; then by chance, in any order."""
    busy = [(0, 10), (20, 30)]
    by_hand: list[tuple[Spans, Spans]] = [
        ([], []),
        (busy, []),
        ([], [(3, 8)]),
        (busy, [(10, 20)]),
        (busy, [(22, 25), (2, 9)]),
        (busy, [(5, 40)]),
        (busy, [(30, 31), (15, 25)]),
    ]
    for compute, transfers in by_hand:
        yield Trial([(compute, transfers)], APART)
    for _ in range(6):
        yield Trial([(_apart(dice), _apart(dice))], APART)
    yield Trial([(busy, [(8, 14), (8, 14)])], PILED)
    yield Trial([([(0, 10), (4, 12), (5, 6)], [(2, 20)])], PILED)
    for _ in range(6):
        yield Trial([(_piled(dice), _piled(dice))], PILED)


def _apart(dice: Dice) -> Spans:
    spans, at = [], 0
    for _ in range(dice.integer(3, 8)):
        start = at + dice.integer(1, 5)
        at = start + dice.integer(1, 9)
        spans.append((start, at))
    return spans[::2] + spans[1::2]


def _piled(dice: Dice) -> Spans:
    starts = [dice.integer(0, 40) for _ in range(dice.integer(4, 9))]
    return [(start, start + dice.integer(1, 12)) for start in starts]


def _check(run: Run, label: str) -> None:
    if run.trial.label != label:
        return
    compute, transfers = run.inputs[0]
    wanted = intervals.length(intervals.difference(transfers, compute))
    what = f"exposed({compute}, {transfers})"
    expect_close(run.ranks[0].result, wanted, 1e-9, what)


EXPOSED = Exercise(
    name="exposed",
    points=2,
    minutes=20,
    trials=_trials,
    poison=(
        "pdt.measure.intervals.union",
        "pdt.measure.intervals.difference",
        "pdt.measure.intervals.intersection",
        "pdt.measure.intervals.length",
    ),
    properties=(
        Property(
            "finds what no compute covers",
            lambda run: _check(run, APART),
            "cut the time at every start and end; a piece counts if a transfer covers it and no "
            "compute does.",
        ),
        Property(
            "counts a moment once, however many spans cover it",
            lambda run: _check(run, PILED),
            "join spans that overlap before you add or subtract lengths.",
        ),
    ),
)
