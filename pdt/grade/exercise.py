"""What an exercise is: trials that the learner's code runs through, properties that must then hold.

Pure: no process group, and nothing here runs the learner's code. Names of the things:
a *trial* is one call on n ranks with hidden inputs; a *run* is a trial and what was seen of it, by
rank; a *property* judges runs, in the grader's process, from plain data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from pdt.comm.cost import Link
from pdt.comm.record import Record
from pdt.grade.dice import Dice

SLUG = re.compile(r"\d\d_([a-z][a-z0-9_]*)")


class Wrong(Exception):
    """Raised by a property that does not hold: two short phrases, what it wants and what it saw."""

    def __init__(self, expected: object, seen: object) -> None:
        super().__init__(f"expected {expected}, seen {seen}")
        self.expected, self.seen = str(expected), str(seen)


@dataclass(frozen=True)
class Trial:
    """One call on as many ranks as there are `inputs`: rank r gets the arguments `inputs[r]`.

    Inputs are tuples of whatever pickles. `label` says in the report which case this is. With
    `link` every transfer is on that emulated wire.
    """

    inputs: list[tuple]
    label: str = ""
    link: Link | None = None

    @property
    def world_size(self) -> int:
        return len(self.inputs)

    @property
    def title(self) -> str:
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        return f"{ranks}, {self.label}" if self.label else ranks


@dataclass(frozen=True)
class Seen:
    """What one rank showed in one trial, as plain data: numbers, texts, tensors, lists, dicts.

    `result` is what `drive` returned, `args` its arguments after the call; `records` the calls that
    the meter saw, in order; `peak` the ledger's bytes by kind at the moment of the highest total,
    {} unless the exercise asks for the ledger.
    """

    result: Any
    args: tuple
    records: list[Record]
    seconds: float
    peak: dict[str, int]

    @property
    def pending(self) -> list[Record]:
        """Calls whose end nobody has seen: sends and receives that were not waited for."""
        return [record for record in self.records if record.end_s is None]

    @property
    def wire_nbytes(self) -> float:
        """Bytes that this rank sends, by the meter, whatever calls it made."""
        return sum(record.wire_nbytes for record in self.records)


@dataclass(frozen=True)
class Run:
    """A trial and what was seen of it, by rank; `printed` is the end of what the ranks printed."""

    trial: Trial
    ranks: list[Seen]
    printed: str = ""

    @property
    def world_size(self) -> int:
        return self.trial.world_size

    @property
    def inputs(self) -> list[tuple]:
        """What each rank was given, untouched by the learner's code."""
        return self.trial.inputs


@dataclass(frozen=True)
class Property:
    """One thing that must hold of every run: `check(run)` raises `Wrong` when it does not.

    `title` completes the sentence "your code ..."; `advice` is one sentence on what to do.
    `picture` may draw the failing run: a text, or a figure that the notebook displays.
    """

    title: str
    check: Callable[[Run], None]
    advice: str
    picture: Callable[[Run], Any] | None = None


@dataclass(frozen=True)
class Relation:
    """One thing that must hold of all runs together: `check(runs)` raises `Wrong` if not."""

    title: str
    check: Callable[[list[Run]], None]
    advice: str
    picture: Callable[[list[Run]], Any] | None = None


def call(learner: Any, *args: Any) -> Any:
    """The usual `drive`: call the learner's function, or take the learner's number as it is."""
    return learner(*args) if callable(learner) else learner


@dataclass(frozen=True)
class Exercise:
    """What is asked, how it is tried, and what must hold.

    `name` is the object's name in the notebook. `trials(dice)` makes the hidden inputs.
    `drive(learner, *args)` runs on every rank: it uses the learner's object and returns plain data.
    `poison` names what must not be called meanwhile (the package's own twin of the piece, torch's).
    `ledger`: count memory, too. `timeout_s`: no single trial takes longer.
    """

    name: str
    points: int
    minutes: int
    trials: Callable[[Dice], Iterable[Trial]]
    properties: tuple[Property | Relation, ...]
    drive: Callable[..., Any] = call
    poison: tuple[str, ...] = ()
    ledger: bool = False
    timeout_s: float = 15.0


def lesson(slug: str) -> ModuleType:
    """The module that grades lesson `NN_name`: `pdt.grade.name`, which holds `EXERCISES`."""
    match = SLUG.fullmatch(slug)
    if match is None:
        raise ValueError(f"{slug!r} is not the name of a lesson, which looks like 02_collectives")
    name = f"pdt.grade.{match[1]}"
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(f"lesson {slug!r} has no grader: there is no module {name}") from None
    if not hasattr(module, "EXERCISES"):
        raise ValueError(f"lesson {slug!r} has no grader: {name} holds no EXERCISES")
    return module


def exercises(slug: str) -> tuple[Exercise, ...]:
    """The exercises of lesson `NN_name`; ValueError when there is no such lesson."""
    return lesson(slug).EXERCISES


def find(name: str) -> Exercise:
    """The exercise called `NN_lesson.exercise`; ValueError, with the names there are, if none."""
    slug, _, wanted = name.partition(".")
    known = {exercise.name: exercise for exercise in exercises(slug)}
    if wanted not in known:
        raise ValueError(f"lesson {slug} has no exercise {wanted!r}: it has {', '.join(known)}")
    return known[wanted]
