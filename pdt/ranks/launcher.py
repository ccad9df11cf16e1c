"""The notebook's end of the fork server: start it once, ask it for ranks."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from functools import cache

from pdt.ranks.interrupt import interrupt_later

START_S = 120.0
ANSWER_S = 30.0
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from pdt.ranks.server import serve; serve(int(sys.argv[1]))"
)


class ForkServer:
    """Owns one server process; `fork_rank` and `end` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        self._pid = os.getpid()
        try:
            with theirs, interrupt_later():
                self._process = _spawn(theirs.fileno())
            self._receive(START_S, "import torch and be ready")
        except BaseException:
            if hasattr(self, "_process"):
                self._process.kill()  # busy importing: it would end some seconds later
                self.close()
            raise

    @property
    def alive(self) -> bool:
        return self._pid == os.getpid() and self._process.poll() is None

    def fork_rank(self, fds: list[int]) -> int:
        """Start one rank that owns copies of the descriptors; its pid."""
        with interrupt_later(), self._lock:  # a request and its answer belong together
            socket.send_fds(self._control, [b"F"], fds)
            return int(self._receive(ANSWER_S, "fork a rank"))

    def end(self, pid: int, *, kill: bool) -> int:
        """Wait for a rank's end (kill it first if asked to); its exit code, minus the signal."""
        with interrupt_later(), self._lock:
            self._control.sendall(b"%s %d" % (b"K" if kill else b"W", pid))
            return int(self._receive(ANSWER_S, f"end the rank with pid {pid}"))

    def close(self) -> None:
        """End the server and with it all ranks."""
        self._control.close()
        if self._pid != os.getpid():
            return  # a forked copy of the notebook: the server is not its own
        with interrupt_later():
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _receive(self, timeout_s: float, purpose: str) -> bytes:
        if not select.select([self._control], [], [], timeout_s)[0]:
            raise RuntimeError(f"the fork server did not {purpose} within {timeout_s:g} s")
        answer = self._control.recv(64)
        if not answer:
            code = self._process.wait()
            raise RuntimeError(f"the fork server ended (exit code {code}) and could not {purpose}")
        return answer


def _spawn(control_fd: int) -> subprocess.Popen:
    path = [entry or os.getcwd() for entry in sys.path]
    return subprocess.Popen(
        [sys.executable, "-c", BOOT, str(control_fd), json.dumps(path)],
        pass_fds=[control_fd],
        env=_server_environment(),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _server_environment() -> dict[str, str]:
    """One thread per rank: two ranks on two cores are fast, two ranks with two threads are not."""
    one_thread = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    return {**os.environ, **one_thread}


@cache
def _servers() -> list[ForkServer]:
    servers: list[ForkServer] = []

    def close_all() -> None:
        for server in servers:
            with contextlib.suppress(OSError):
                server.close()

    atexit.register(close_all)
    return servers


def fork_server() -> ForkServer:
    """This process's server, started at the first call and again if it was killed."""
    servers = _servers()
    if not servers or not servers[-1].alive:
        servers[:] = [ForkServer()]
    return servers[-1]
