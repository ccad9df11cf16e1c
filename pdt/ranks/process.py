"""One rank as its parent sees it: a pid, a connection for calls, one for questions, its output."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection, wait

import torch.distributed as dist

from pdt.comm import Link
from pdt.ranks.errors import RankError
from pdt.ranks.interrupt import interrupt_later
from pdt.ranks.launcher import ForkServer
from pdt.ranks.transport import Message, receive
from pdt.ranks.watchdog import RankState
from pdt.ranks.worker import Answer, Setup

START_S = 60.0


class RankProcess:
    """Owns one forked rank and the parent's ends of its descriptors."""

    def __init__(self, rank: int, server: ForkServer) -> None:
        self.rank = rank
        self._server = server
        calls, their_calls = socket.socketpair()
        questions, their_questions = socket.socketpair()
        self.output_fd, their_output = os.pipe()
        self.output_open = True
        os.set_blocking(self.output_fd, False)
        self.calls = Connection(calls.detach())
        self._questions = Connection(questions.detach())
        try:
            fds = [their_calls.fileno(), their_questions.fileno(), their_output]
            self.pid = server.fork_rank(fds)
        finally:
            their_calls.close()
            their_questions.close()
            os.close(their_output)

    def answer(self) -> tuple[Answer, Message | None]:
        """The answer that has arrived; EOFError or OSError when the rank is gone."""
        answer: Answer = pickle.loads(self.calls.recv_bytes())
        return answer, receive(self.calls) if answer.kind == "ok" else None

    def ask_state(self) -> None:
        """Ask what the rank waits in; `told_state` has the answer."""
        with contextlib.suppress(OSError, EOFError):
            while self._questions.poll(0):  # an answer that came too late for its question
                self._questions.recv_bytes()
            self._questions.send_bytes(b"?")

    def told_state(self, timeout_s: float) -> RankState | None:
        """What the rank says; None if it says nothing (busy in C code, stopped, dead)."""
        with contextlib.suppress(OSError, EOFError):
            if self._questions.poll(timeout_s):
                return pickle.loads(self._questions.recv_bytes())
        return None

    def dump_stack(self) -> None:
        """Have faulthandler print the rank's Python stack on its output, even inside C code."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def read_output(self) -> bytes | None:
        """What the rank has printed since; b"" at its end, None when there is nothing now."""
        try:
            data = os.read(self.output_fd, 1 << 16)
        except BlockingIOError:
            return None
        self.output_open = bool(data)
        return data

    def end(self) -> str:
        """How the process ended, in words."""
        try:
            code = self._server.end(self.pid, kill=False)
        except (OSError, RuntimeError):
            return "the server that had started it is gone"
        if code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name
        memory = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
        return f"killed by {name}{memory}"

    def close(self) -> None:
        """Kill the rank, reap it and close our ends; it is gone when this returns."""
        with contextlib.suppress(RuntimeError, OSError):  # the server is gone, and its ranks too
            self._server.end(self.pid, kill=True)
        self.calls.close()
        self._questions.close()
        os.close(self.output_fd)


def start(
    server: ForkServer, world_size: int, backend: str, link: Link | None, timeout_s: float
) -> tuple[list[RankProcess], dist.TCPStore]:
    """Fork `world_size` ranks and tell each to join the process group: `await_ready` comes next.

    The store must live as long as they do: the groups that they make later meet in it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[RankProcess] = []
    try:
        for rank in range(world_size):
            processes.append(RankProcess(rank, server))
        for process in processes:
            setup = _setup(process.rank, world_size, store.port, backend, link, timeout_s)
            process.calls.send_bytes(pickle.dumps(setup))
    except BaseException:
        close(processes)
        raise
    return processes, store


def close(processes: list[RankProcess]) -> None:
    """Kill these ranks, all of them: an interrupt waits."""
    with interrupt_later():
        for process in processes:
            process.close()


def _setup(
    rank: int, world_size: int, port: int, backend: str, link: Link | None, timeout_s: float
) -> Setup:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": "1",
    }
    path = [entry or os.getcwd() for entry in sys.path]
    # The pool's own watchdog comes first: it can say who waits for whom, gloo's time-out cannot.
    patience_s = 2 * timeout_s + 30
    return Setup(rank, world_size, port, backend, link, patience_s, os.getcwd(), path, environment)


def await_ready(processes: list[RankProcess]) -> None:
    """Return when all have joined; RankError when one could not."""
    waiting = {process.calls: process for process in processes}
    deadline = time.monotonic() + START_S
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = sorted(process.rank for process in waiting.values())
            raise RankError(ranks[0], "hung", f"ranks {ranks} did not start in {START_S:g} s")
        for calls in ready:
            process = waiting.pop(calls)  # type: ignore[call-overload]
            try:
                process.calls.recv_bytes()
            except (EOFError, OSError):
                text = (process.read_output() or b"").decode(errors="replace")
                headline = f"rank {process.rank} could not start ({process.end()})"
                raise RankError(process.rank, "died", headline, text) from None
