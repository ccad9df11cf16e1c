"""A fork server: one process that has imported torch and forks a rank in milliseconds.

Forking the notebook itself is out: once it has run one multi-threaded matmul, its forked children
hang in the thread pool they lack, and CUDA cannot be initialised again. This server only imports.
It is started as a fresh interpreter in a session of its own, so an interrupt typed in the notebook
reaches neither it nor its ranks. It ends, and every rank with it, when the notebook's end of the
control socket closes, whatever ended the notebook.

Requests on the control socket: b"F" with three descriptors (calls, questions, output) forks a rank
and answers its pid; b"W <pid>" waits for that rank's end and answers its status; b"K <pid>" kills
it first. The standard library's own fork server would import the caller's `__main__` again in each
child, and so ask every script for a guard.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # 2 seconds: torch.optim imports it at the first step
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "cloudpickle",
    "pdt.comm",
    "pdt.comm.shm",
    "pdt.ranks.worker",
)
GONE_AFTER_S = 2.0


def serve(control_fd: int) -> None:
    """Fork ranks on request until the other end of the control socket is closed."""
    for name in PRELOAD:
        __import__(name)
    gc.freeze()  # the preloaded objects stay shared: no collection touches their pages
    control = socket.socket(fileno=control_fd)
    parent = os.getppid()
    ranks: dict[int, int | None] = {}  # pid -> wait status, None while it runs
    try:
        control.sendall(b"R")
        while os.getppid() == parent:
            if not select.select([control], [], [], 1.0)[0]:
                continue
            request, fds, _, _ = socket.recv_fds(control, 64, 3)
            if not request:
                break
            control.sendall(b"%d\n" % _answer(request, list(fds), control, ranks))
    except ConnectionError:
        pass  # the notebook ended before it heard the answer
    finally:
        for pid in [pid for pid, status in ranks.items() if status is None]:
            os.kill(pid, signal.SIGKILL)


def _answer(
    request: bytes, fds: list[int], control: socket.socket, ranks: dict[int, int | None]
) -> int:
    if request == b"F":
        pid = _fork_rank(fds, control)
        ranks[pid] = None
        return pid
    verb, pid = request[:1], int(request[2:])
    if verb == b"K" and ranks.get(pid, 0) is None:
        os.kill(pid, signal.SIGKILL)
    return _wait(pid, ranks)


def _fork_rank(fds: list[int], control: socket.socket) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            from pdt.ranks.worker import main

            calls, questions, output = fds
            main(calls, questions, output, server)
        finally:
            os._exit(1)
    for fd in fds:
        os.close(fd)
    return pid


def _wait(pid: int, ranks: dict[int, int | None]) -> int:
    """The rank's exit code (negative: the signal that ended it); 0 if it still runs after 2 s."""
    deadline = time.monotonic() + GONE_AFTER_S
    while pid in ranks and ranks[pid] is None and time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            ranks[pid] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.002)
    return (ranks.pop(pid, 0) if ranks.get(pid) is not None else 0) or 0


if __name__ == "__main__":
    serve(int(sys.argv[1]))
