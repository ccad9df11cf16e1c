"""Lesson 14's exercise on the window: read ahead, write behind, with k buffers and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_int, expect_tensor
from pdt.grade.fake_files import READ, USE, WRITE, FakeFiles, picture

REPEATED = "items that come again"


def _trials(dice: Dice) -> Iterator[Trial]:
    for k, count in ((1, 3), (2, 5), (3, 6), (3, 2), (4, 1), (5, 9)):
        names = [chr(97 + i) for i in range(count)]
        buffers = f"{k} buffer{'s' * (k > 1)}"
        yield Trial([(_contents(dice, names), names, k)], f"{buffers}, {count} items")
    for k, order in ((1, "aab"), (2, "abba"), (3, "abab"), (4, "aaabca"), (5, "abcabc")):
        contents = _contents(dice, sorted(set(order)))
        yield Trial([(contents, list(order), k)], f"{k} buffers, {REPEATED}: {order}")


def _contents(dice: Dice, names: list[str]) -> dict[str, Tensor]:
    return {name: dice.integers((3,), torch.float64) for name in names}


def _drive(
    learner: Callable[..., Any], contents: dict[str, Tensor], names: list[str], k: int
) -> dict[str, Any]:
    """Use each item as it comes: twice what it was, and the number of the use added."""
    files = FakeFiles(contents)
    seen, order = [], []
    for use, (name, buffer) in enumerate(learner(files, list(names), k)):
        files.note_use(name, buffer)
        order.append(name)
        seen.append(buffer.clone())
        buffer.mul_(2).add_(use)
        if use > 2 * len(names):
            break
    return {
        "order": order,
        "seen": seen,
        "contents": files.contents,
        "made": len(files.made),
        "under way": files.under_way,
        "log": [list(event) for event in files.log],
    }


def _expected(run: Run) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What each use sees, and what the files hold in the end."""
    contents, names, _ = run.inputs[0]
    held, seen = {name: content.clone() for name, content in contents.items()}, []
    for use, name in enumerate(names):
        seen.append(held[name].clone())
        held[name] = held[name] * 2 + use
    return seen, held


def _sees(run: Run) -> None:
    names, result = run.inputs[0][1], run.ranks[0].result
    expect(result["order"] == names, f"the items {' '.join(names)}", " ".join(result["order"]))
    for use, expected in enumerate(_expected(run)[0]):
        expect_tensor(result["seen"][use], expected, f"use {use}, of {names[use]!r},")


def _writes(run: Run) -> None:
    result = run.ranks[0].result
    expect_int(result["under way"], 0, "the transfers that nobody has waited for at the end")
    for name, expected in _expected(run)[1].items():
        expect_tensor(result["contents"][name], expected, f"file {name!r}")


def _has_few(run: Run) -> None:
    k, made = run.inputs[0][2], run.ranks[0].result["made"]
    expect(made <= k, f"{k} buffers at most", f"{made}")


def _once_each(run: Run) -> None:
    _, names, _ = run.inputs[0]
    begun = [what for what, _, _ in run.ranks[0].result["log"]]
    for what in (READ, WRITE):
        expect_int(begun.count(what), len(names), f"the number of {what}s")


def _at_uses(run: Run) -> Iterator[tuple[int, int, int, int]]:
    """At each use: its number, items read ahead, of these not waited for, being written."""
    reads = reads_over = writes = writes_over = use = 0
    for what, _, _ in run.ranks[0].result["log"]:
        reads += what == READ
        reads_over += what == f"{READ} over"
        writes += what == WRITE
        writes_over += what == f"{WRITE} over"
        if what == USE:
            yield use, reads - use - 1, reads - reads_over, writes - writes_over
            use += 1


def _is_plain(run: Run) -> bool:
    return REPEATED not in run.trial.label


def _reads_ahead(run: Run) -> None:
    """With k buffers, of which one is used and one may be written from."""
    _, names, k = run.inputs[0]
    for use, ahead, under_way, _ in _at_uses(run):
        wanted = min(max(k - 2, 0), len(names) - use - 1)
        if _is_plain(run):
            text = f"{wanted} items begun ahead of use {use}"
            expect(ahead >= wanted, text, f"{ahead}")
            expect(under_way >= wanted, f"{wanted} of them not waited for", f"{under_way}")


def _writes_behind(run: Run) -> None:
    _, _, k = run.inputs[0]
    for use, _, _, writing in _at_uses(run):
        if _is_plain(run) and k >= 3 and use:
            expect(writing >= 1, f"the item before being written during use {use}", f"{writing}")


def _is_never_idle(run: Run) -> None:
    """With two buffers, the other one is read into or written from."""
    _, names, k = run.inputs[0]
    for use, _, reading, writing in _at_uses(run):
        if _is_plain(run) and k == 2 and 0 < use < len(names) - 1:
            expect(reading + writing >= 1, f"a transfer under way during use {use}", "none")


def _picture(run: Run) -> str:
    return picture(tuple(event) for event in run.ranks[0].result["log"])


WALK = Exercise(
    name="walk",
    points=3,
    minutes=30,
    trials=_trials,
    drive=_drive,
    poison=("pdt.offload.nvme.SwapWindow", "pdt.offload.read_ahead.ReadAhead"),
    properties=(
        Property(
            "shows each item as the last use left it",
            _sees,
            "wait for an item's read before you yield it, and do not read it again before its "
            "write has begun.",
            _picture,
        ),
        Property(
            "has all of it in the files at the end",
            _writes,
            "wait for a buffer's write before you read into it, and for all that is left.",
            _picture,
        ),
        Property("makes k buffers at most", _has_few, "a buffer that is written serves again."),
        Property(
            "reads and writes an item once each time",
            _once_each,
            "one read and one write for each name of the list.",
            _picture,
        ),
        Property(
            "reads k - 2 items ahead",
            _reads_ahead,
            "before you yield, begin to read into every free buffer; wait for a read only when it "
            "is that item's turn.",
            _picture,
        ),
        Property(
            "writes behind the next use",
            _writes_behind,
            "begin the write, go on, and wait for it when its buffer is wanted.",
            _picture,
        ),
        Property(
            "uses the second of two buffers meanwhile",
            _is_never_idle,
            "with two buffers, leave the last write under way, or begin the next read.",
            _picture,
        ),
    ),
)
