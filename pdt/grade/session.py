"""Runs the learner's code on live ranks, trial after trial, and survives whatever it does."""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import cloudpickle

from pdt.comm.cost import Link
from pdt.grade import onrank
from pdt.grade.exercise import Exercise, Run, Trial
from pdt.ranks import RankError, Ranks

MARK = f"{onrank.Stopped.__module__}.{onrank.Stopped.__qualname__}: "
PRINTED_CHARS = 2000


@dataclass(frozen=True)
class Stop:
    """Why no further trial was run: a kind ("unwritten", "raised", "hung", ...) and its story."""

    kind: str
    text: str


@dataclass(frozen=True)
class Submission:
    """A learner's object as bytes that only ranks open; or `problem`, why there is none.

    `folder`: where the learner's own modules lie, if there are any.
    """

    blob: bytes = b""
    problem: Stop | None = None
    folder: str | None = None

    @classmethod
    def of(cls, learner: Any) -> Submission:
        """Pack an object of this process."""
        try:
            return cls(cloudpickle.dumps(learner))
        except Exception as error:
            return cls(problem=Stop("raised", f"it cannot be sent to the ranks: {error}"))


class Tail(io.TextIOBase):
    """A text stream that remembers only the end of what is written to it."""

    def __init__(self, chars: int = PRINTED_CHARS) -> None:
        self._chars, self._text = chars, ""

    def write(self, text: str) -> int:
        self._text = (self._text + text)[-self._chars :]
        return len(text)

    def take(self) -> str:
        """What is remembered, and forget it."""
        text, self._text = self._text, ""
        return text


class Session:
    """Owns pools of live ranks, one per world size and link, started when first needed.

    Exercises may follow each other on the same ranks; ranks that a submission has left in doubt are
    replaced. `memory_gb` is what one rank may take for itself, `timeout_s` what all trials of one
    exercise may take together.
    """

    def __init__(self, *, memory_gb: float = 4.0, timeout_s: float = 120.0) -> None:
        self._nbytes, self._timeout_s = int(memory_gb * 2**30), timeout_s
        self._deadline_s = 0.0
        self._pools: dict[tuple[int, Link | None], Ranks] = {}

    def run(
        self, exercise: Exercise, submission: Submission, trials: Iterable[Trial]
    ) -> tuple[list[Run], Stop | None]:
        """Run the trials by world size, up to the first that does not come to its end."""
        if submission.problem is not None:
            return [], submission.problem
        runs: list[Run] = []
        self._deadline_s = time.monotonic() + self._timeout_s
        in_order = sorted(trials, key=lambda trial: trial.world_size)
        for (_, link), group in itertools.groupby(in_order, lambda t: (t.world_size, t.link)):
            stop = self._run_group(exercise, submission, list(group), link, runs)
            if stop is not None:
                return runs, stop
        return runs, None

    def _run_group(
        self,
        exercise: Exercise,
        submission: Submission,
        trials: list[Trial],
        link: Link | None,
        runs: list[Run],
    ) -> Stop | None:
        """Trials of one world size: adds to `runs`, and says what ended them early."""
        ranks = self._pool(trials[0].world_size, link)
        inputs = _inputs_by_rank(trials)
        ready = False
        for index, trial in enumerate(trials):
            if not ready:
                self._prepare(ranks, exercise, submission, inputs)
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                return Stop("slow", f"all trials together took over {self._timeout_s:g} s")
            ranks.timeout_s, output = min(left_s, exercise.timeout_s), Tail()
            try:
                with contextlib.redirect_stdout(output):
                    seen = [onrank.unpack(data) for data in ranks.run(onrank.perform, index)]
            except RankError as error:
                ranks.close()  # whatever it did, the next code meets fresh processes
                return _stop(error, trial, output.take())
            except Exception as error:  # what came back is not what `perform` sends
                ranks.close()
                return Stop("unreadable", f"{type(error).__name__}: {error} ({trial.title})")
            runs.append(Run(trial, seen, output.take()))
            ready = not _messages_left(runs[-1])
            if not ready:
                ranks.close()  # a message that nobody took would meet the next trial
        return None

    def _prepare(
        self, ranks: Ranks, exercise: Exercise, submission: Submission, inputs: list[bytes]
    ) -> None:
        ranks.run(
            onrank.prepare,
            inputs,
            submission.blob,
            exercise.drive,
            exercise.poison,
            exercise.ledger,
            self._nbytes,
            submission.folder,
        )

    def _pool(self, world_size: int, link: Link | None) -> Ranks:
        key = (world_size, link)
        if key not in self._pools:
            self._pools[key] = Ranks(world_size, backend="gloo", link=link)
        return self._pools[key]

    def close(self) -> None:
        """End all ranks."""
        for ranks in self._pools.values():
            ranks.close()
        self._pools.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _inputs_by_rank(trials: list[Trial]) -> list[bytes]:
    """By rank: its inputs of all trials, packed so that no other rank opens them."""
    world_size = trials[0].world_size
    return [pickle.dumps([trial.inputs[rank] for trial in trials]) for rank in range(world_size)]


def _stop(error: RankError, trial: Trial, printed: str) -> Stop:
    _, marked, story = error.text.partition(MARK)
    if error.kind == "raised" and marked:
        kind, _, text = story.partition("\n")
    else:
        kind, text = error.kind, f"{error.headline}\n{error.text}".rstrip()
    if kind in ("raised", "died", "hung"):
        text = f"{text}\n({trial.title}, rank {error.rank})"
        if printed.strip():
            text += f"\nprinted last: {printed.strip()[-300:]}"
    return Stop(kind, text)


def _messages_left(run: Run) -> bool:
    """Whether a message was sent that nobody received, or awaited that nobody sent."""
    balance: Counter[tuple[int, int | None]] = Counter()
    for rank, seen in enumerate(run.ranks):
        for record in seen.records:
            if record.op == "send":
                balance[rank, record.peer] += 1
            elif record.op == "recv":
                balance[record.peer if record.peer is not None else -1, rank] -= 1
    return any(balance.values())
