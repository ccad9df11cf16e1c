"""Lesson 14's exercise on crashes: a file that is the old one or the new one, or says that it is
neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pdt.grade.crashes import CRASH, DAMAGE, FULL, ROUND_TRIP, drive
from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect
from pdt.grade.fake_disk import KILLED, LOST, LOST_NAMES


def _trials(dice: Dice) -> Iterator[Trial]:
    contents = [_bytes(dice, n) for n in (0, 1, 127, 4097, 0, 5)]
    contents.append(contents[1] + "0000")  # also what ends in zeros
    yield Trial([(ROUND_TRIP, contents)], ROUND_TRIP)
    for sizes in ((64, 64, 64), (40, 90, 3)):
        yield Trial([(CRASH, [_bytes(dice, n) for n in sizes])], f"{CRASH}, {sizes[1]} bytes")
    yield Trial([(DAMAGE, [_bytes(dice, n) for n in (0, 1, 64, 300)])], DAMAGE)
    yield Trial([(FULL, [_bytes(dice, 64), _bytes(dice, 64)])], FULL)


def _bytes(dice: Dice, length: int) -> str:
    return bytes(dice.integer(1, 255) for _ in range(length)).hex()


def _of(run: Run, kind: str) -> tuple[Any, list[str]]:
    """What was seen, or nothing where this is a trial of another kind."""
    seen_kind, contents = run.inputs[0]
    return (run.ranks[0].result if seen_kind == kind else []), contents


def _reads_back(run: Run) -> None:
    seen, contents = _of(run, ROUND_TRIP)
    for (now, later, _), content in zip(seen, [*contents, contents[-1]], strict=False):
        wanted = f"the {len(content) // 2} bytes that were written"
        for found in (now, later):
            expect(found == content, wanted, _short(found))


def _old_or_new(*ends: str) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        seen, contents = _of(run, CRASH)
        for is_over, end, found, _, _, call in seen:
            if end in ends and not is_over:
                where = f"{end} in call {call}"
                expect(found in contents[:2], f"old or new, {where}", _short(found))

    return check


def _stays(run: Run) -> None:
    seen, contents = _of(run, CRASH)
    for is_over, end, found, _, _, _ in seen:
        if is_over:
            what = f"the new content when write has returned and then: {end}"
            expect(found == contents[1], what, _short(found))


def _goes_on(run: Run) -> None:
    seen, contents = _of(run, CRASH)
    for _, end, _, again, _, call in seen:
        what = f"the next write read back, after: {end} in call {call}"
        expect(again == contents[2], what, _short(again))


def _is_alone(run: Run) -> None:
    for _, _, names in _of(run, ROUND_TRIP)[0]:
        expect(names == ["other", "w"], "the files other and w", ", ".join(names))
    for _, end, _, _, names, call in _of(run, CRASH)[0]:
        what = f"only w after the write that follows: {end} in call {call}"
        expect(names == ["w"], what, ", ".join(names))
    if seen := _of(run, FULL)[0]:
        expect(seen[2] == ["w"], "only w after a write that found no room", ", ".join(seen[2]))


def _says_so(run: Run) -> None:
    for what, length, found in _of(run, DAMAGE)[0]:
        wanted = f"ValueError for a file of {length} bytes of content, {what}"
        expect(found == "ValueError", wanted, _short(found))


def _has_no_room(run: Run) -> None:
    seen, contents = _of(run, FULL)
    if seen:
        expect(seen[0] == "OSError", "the disk's OSError from write", seen[0])
        expect(seen[1] == contents[0], "the old content after it", _short(seen[1]))


def _short(found: str) -> str:
    """Contents by their beginning; an error by its name."""
    try:
        return f"{len(bytes.fromhex(found))} bytes, {found[:16]}..."
    except ValueError:
        return found


SAFE_FILES = Exercise(
    name="SafeFiles",
    points=3,
    minutes=30,
    trials=_trials,
    drive=drive,
    poison=("pdt.offload.tensor_file.save_durably", "pdt.offload.tensor_file.load"),
    properties=(
        Property(
            "reads back what it wrote",
            _reads_back,
            "all bytes, also none, by name, and by another object on the same disk.",
        ),
        Property(
            "has the old or the new content when the process is killed",
            _old_or_new(KILLED),
            "write beside the file, and rename when it is whole.",
        ),
        Property(
            "has the old or the new content when the power fails",
            _old_or_new(LOST, LOST_NAMES),
            "sync the new file before you rename it: else its name may come before its bytes.",
        ),
        Property(
            "is on the disk when write returns",
            _stays,
            "a rename is a change of the folder: sync that, too, at the end.",
        ),
        Property(
            "goes on after a crash",
            _goes_on,
            "the next write may find what the last one left: begin with an empty file.",
        ),
        Property(
            "keeps the old content when the disk is full",
            _has_no_room,
            "let the OSError out, with the file as it was.",
        ),
        Property(
            "leaves no other file",
            _is_alone,
            "after an error remove what you began; after a crash the next write takes its place.",
        ),
        Property(
            "says so when a file has been cut or changed",
            _says_so,
            "a checksum over all of it, the length among it, and ValueError where it differs; an "
            "empty file is damaged, too.",
        ),
    ),
)
