"""Moves the calls of a shared-memory group forward: in the thread that waits, else in a worker.

A thread that waits for a call drives it itself, so that a synchronous call costs no switch of
threads. The worker, started by the first asynchronous call, drives what nobody waits for.
"""

import queue
import threading
import time

from pdt.comm.shm.board import Board
from pdt.comm.shm.work import ShmWork

COLLECTIVE = "collective"  # the lane of all collectives


class Engine:
    """The calls under way; one thread at a time drives them, each lane in its order."""

    def __init__(self, board: Board, timeout_s: float) -> None:
        self._board, self._timeout_s = board, timeout_s
        self._works: list[ShmWork] = []
        self._driving = threading.Lock()
        self._ended = threading.Condition()
        self._waiting = 0
        self._kicks: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._broken: BaseException | None = None

    def submit(self, work: ShmWork) -> None:
        """Take a call in; it moves once somebody drives it."""
        if self._broken is not None:
            work.finish(RuntimeError(f"this group failed before: {self._broken}"))
            return
        self._works.append(work)

    def start(self) -> None:
        """Let the worker drive what has been submitted."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="shm", daemon=True)
            self._worker.start()
        self._kicks.put(True)
        self._board.nudge()

    def close(self) -> None:
        """Stop the worker; calls under way fail."""
        self._fail_all(RuntimeError("the group was shut down"))
        self._kicks.put(False)
        self._board.nudge()

    def drive_until(self, work: ShmWork, timeout_s: float = 0.0) -> None:
        """Return when `work` is done, driving it unless another thread does."""
        if timeout_s > 0:
            work.deadline = time.monotonic() + timeout_s
        while not work.done:
            if self._driving.acquire(blocking=False):
                self._drive(work)
            else:
                self._board.nudge()  # the driver may be asleep without knowing of this call
                self._wait_for_driver(work)

    def _wait_for_driver(self, work: ShmWork) -> None:
        self._waiting += 1
        with self._ended:
            if not work.done and self._driving.locked():
                self._ended.wait(0.02)
        self._waiting -= 1

    def _work(self) -> None:
        while self._kicks.get():
            while self._works:
                self._driving.acquire()
                self._drive(None)

    def _drive(self, until: ShmWork | None) -> None:
        """Drive until some call has ended and settle it; `_driving` is held, and let go here."""
        ended: list[ShmWork] = []
        try:
            if until is None or not until.done:
                ended = self._drive_some()
        except BaseException as error:  # KeyboardInterrupt: the calls are left half done
            ended = self._fail_all(error)
            raise
        finally:
            self._driving.release()
            for work in ended:
                work.settle()
            if self._waiting:
                with self._ended:
                    self._ended.notify_all()

    def _drive_some(self) -> list[ShmWork]:
        """Step all calls, sleeping between, until some have ended: these."""
        attempt = 0
        while self._works:
            epochs = self._board.epochs()  # before looking, so that no news is slept through
            ended, peers = self._step_all()
            if ended:
                return ended
            if self._board.sleep(peers, epochs, attempt):
                attempt = 0
            elif ended := self._look_after():
                return ended
            else:
                attempt += 1
        return []

    def _step_all(self) -> tuple[list[ShmWork], list[int]]:
        """Move each call that may move: those that ended, and the peers whom the others await."""
        ended: list[ShmWork] = []
        blocked: dict[object, list[int]] = {}
        for work in list(self._works):
            if work.lane not in blocked:
                self._step(work)
                if not work.done:
                    blocked[work.lane] = work.awaits
                else:
                    self._works.remove(work)
                    ended.append(work)
        return ended, sorted({peer for peers in blocked.values() for peer in peers})

    def _step(self, work: ShmWork) -> None:
        if not work.deadline:
            work.deadline = time.monotonic() + self._timeout_s
        try:
            work.awaits = next(work.steps)
        except StopIteration:
            work.finish()
        except Exception as error:  # handed to whoever waits
            work.finish(error)

    def _look_after(self) -> list[ShmWork]:
        """Nothing has happened for a while: fail all calls if one waits in vain or for too long."""
        for work in self._works:
            if not work.awaits:
                continue
            lost = self._board.lost(self._late(work))
            self._step(work)  # for they may have done their part before
            if work.done:
                self._works.remove(work)
                return [work]
            late = self._late(work)
            if reasons := [lost[q] for q in late if q in lost]:
                return self._fail_all(RuntimeError(f"{work.text}: {', '.join(reasons)}"))
            if late and time.monotonic() > work.deadline:
                return self._fail_all(
                    RuntimeError(f"{work.text}: time-out, ranks {late} have not come")
                )
        return []

    def _late(self, work: ShmWork) -> list[int]:
        return self._board.late() if work.lane == COLLECTIVE else work.awaits

    def _fail_all(self, error: BaseException) -> list[ShmWork]:
        """No call can be trusted to meet its peers in step any more: fail all, tell the peers."""
        self._broken = error
        works, self._works = self._works, []
        for work in works:
            work.finish(RuntimeError(str(error)))
        self._board.give_up()
        return works
