"""One call on all ranks, seen from the parent: collect answers, show output, notice what fails."""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import wait
from typing import Any

from pdt.ranks import watchdog
from pdt.ranks.errors import RankError
from pdt.ranks.process import RankProcess
from pdt.ranks.transport import Message, send, unpack
from pdt.ranks.watchdog import RankState
from pdt.ranks.worker import Answer

GRACE_S = 2.0  # how long the others may still answer after one rank has failed
QUIET_S = 0.5  # how long nothing happens before the watchdog asks
QUESTION_S = 1.0  # how long a rank may take to say what it waits in


class Printer:
    """Shows what ranks print, a line at a time with its rank, in the cell that made the call."""

    def line(self, rank: int, text: str) -> None:
        sys.stdout.write(f"[rank {rank}] {text}\n")

    def flush(self) -> None:
        sys.stdout.flush()


class Call:
    """Sends one call and waits for its end. Afterwards `error` says what failed, if anything, and
    `ranks_are_sound` whether the processes can still be used."""

    def __init__(self, processes: list[RankProcess], timeout_s: float, printer: Printer) -> None:
        self._processes, self._timeout_s, self._printer = processes, timeout_s, printer
        self._answers: dict[int, Answer] = {}
        self._results: dict[int, Message | None] = {}
        self._died: list[int] = []
        self._tails = [b""] * len(processes)
        self._suspected = False
        self.error: RankError | None = None
        self.ranks_are_sound = True

    def run(self, message: Message) -> list[Any]:
        """The results by rank; [] with `error` set when the call failed."""
        for process in self._processes:
            try:
                send(process.calls, message)
            except OSError:  # died since the last call
                self._died.append(process.rank)
        hang = self._collect()
        self._show_output()
        self.error = self._failure(hang)
        if self.error is not None:
            self.ranks_are_sound = self._sound()
            return []
        results = (self._results[process.rank] for process in self._processes)
        return [unpack(result) for result in results if result is not None]

    def _silent(self) -> list[RankProcess]:
        return [
            process
            for process in self._processes
            if process.rank not in self._answers and process.rank not in self._died
        ]

    def _collect(self) -> str:
        """Wait until all have answered, or one failed and the grace is over; the hang, if it is."""
        started_s = event_s = time.monotonic()
        failed_s = None
        while silent := self._silent():
            now = time.monotonic()
            if failed_s is None and self._has_failed():
                failed_s = now
            if failed_s is not None and now > failed_s + GRACE_S:
                return ""
            if now > started_s + self._timeout_s:
                return self._explain(f"no answer within {self._timeout_s:g} s")
            if now > event_s + QUIET_S:
                if self._is_deadlock():
                    return "" if failed_s else self._explain("no rank can go on")
                event_s = now
            if self._wait(silent):
                event_s, self._suspected = time.monotonic(), False
        return ""

    def _wait(self, silent: list[RankProcess]) -> bool:
        """Take what has arrived: answers, ends, output. True if there was something."""
        by_calls: dict[Any, RankProcess] = {process.calls: process for process in silent}
        by_output = {
            process.output_fd: process for process in self._processes if process.output_open
        }
        ready = wait([*by_calls, *by_output], timeout=0.25)
        for item in ready:
            if isinstance(item, int):
                self._show(by_output[item])
            else:
                self._take_answer(by_calls[item])
        self._printer.flush()
        return bool(ready)

    def _take_answer(self, process: RankProcess) -> None:
        try:
            self._answers[process.rank], self._results[process.rank] = process.answer()
        except (EOFError, OSError):
            self._died.append(process.rank)

    def _has_failed(self) -> bool:
        return bool(self._died) or any(answer.kind != "ok" for answer in self._answers.values())

    def _show(self, process: RankProcess) -> None:
        data = process.read_output()
        if data is None:
            return
        *lines, self._tails[process.rank] = (self._tails[process.rank] + data).split(b"\n")
        for line in lines:
            self._printer.line(process.rank, line.decode(errors="replace"))

    def _show_output(self) -> None:
        """Print what was written before the answers came, unfinished lines too."""
        for process in self._processes:
            while process.output_open and wait([process.output_fd], timeout=0):
                self._show(process)
            if tail := self._tails[process.rank]:
                self._printer.line(process.rank, tail.decode(errors="replace"))
                self._tails[process.rank] = b""
        self._printer.flush()

    def _states(self) -> dict[int, RankState | None]:
        silent = self._silent()
        for process in silent:
            process.ask_state()
        deadline = time.monotonic() + QUESTION_S
        states = {p.rank: p.told_state(max(0.0, deadline - time.monotonic())) for p in silent}
        states |= {rank: RankState([], [], [], returned=True) for rank in self._died}
        for rank, answer in self._answers.items():
            states[rank] = answer.state
            if answer.state:
                answer.state.returned = True
        return dict(sorted(states.items()))

    def _is_deadlock(self) -> bool:
        """Two looks in a row must agree: the first may have met a call on its way."""
        suspected, self._suspected = self._suspected, watchdog.deadlocked(self._states())
        return suspected and self._suspected

    def _explain(self, reason: str) -> str:
        states = watchdog.of_this_run(self._states())
        for process in self._silent():
            if states[process.rank] is None:
                process.dump_stack()
        time.sleep(0.1 * any(state is None for state in states.values()))
        lines = [reason, *watchdog.verdict(states), "", watchdog.table(states)]
        return "\n".join([*lines, *watchdog.places(states)])

    def _failure(self, hang: str) -> RankError | None:
        """The root cause: a death, else the first exception, else the hang."""
        if self._died:
            rank = self._died[0]
            return RankError(rank, "died", f"rank {rank} died ({self._processes[rank].end()})")
        failed = [(a.at_s, rank, a) for rank, a in self._answers.items() if a.kind != "ok"]
        if failed:
            _, rank, answer = min(failed, key=lambda item: item[0])
            also = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
            if answer.kind == "result":
                headline = f"rank {rank} cannot send back its result{also}"
                return RankError(rank, "result", headline, answer.text)
            return RankError(rank, "raised", f"rank {rank} raised{also}", answer.text)
        if hang:
            rank = self._silent()[0].rank
            reason, _, text = hang.partition("\n")
            return RankError(rank, "hung", reason, text)
        return None

    def _sound(self) -> bool:
        """Whether every rank answered and the others have made the calls that match its own."""
        states = {rank: answer.state for rank, answer in self._answers.items() if answer.state}
        return len(states) == len(self._processes) and watchdog.alike(states)
