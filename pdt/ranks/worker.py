"""One rank: set up torch.distributed, then answer calls until the connection is closed."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import linecache
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import pdt.comm
from pdt.comm.meter import MeterGroup
from pdt.ranks import cell
from pdt.ranks.transport import Message, pack, receive, send, unpack
from pdt.ranks.watchdog import RankState

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Setup:
    """What a rank is told at its start."""

    rank: int
    world_size: int
    port: int
    backend: str
    link: pdt.comm.Link | None
    timeout_s: float
    cwd: str
    path: list[str]
    environment: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class Task:
    """One call: `takes_namespace` passes the rank's lasting namespace first (`%%ranks`)."""

    fn: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    takes_namespace: bool = False
    sources: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What a rank says of one call: `kind` is "ok" (the result follows in a message of its own),
    "raised" (`text` is the traceback) or "result" (it cannot be sent)."""

    kind: str
    at_s: float
    text: str = ""
    state: RankState | None = None


def main(calls_fd: int, questions_fd: int, output_fd: int, server_pid: int) -> None:
    """The life of a rank process; it leaves by os._exit, so no hook of a library can hold it."""
    _die_with(server_pid)
    _redirect_output(output_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides: it kills, we never unwind
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=False)
    calls = Connection(calls_fd)
    code = 0
    try:
        setup: Setup = pickle.loads(calls.recv_bytes())
        _set_up(setup)
        questions = Connection(questions_fd)
        threading.Thread(target=_answer_questions, args=(questions,), daemon=True).start()
        namespace = {"rank": setup.rank, "world_size": setup.world_size, "torch": torch}
        _serve(calls, namespace | {"dist": dist, "__name__": "__main__"})
    except (EOFError, ConnectionError):
        pass  # the notebook closed the connection: the normal end
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(code)


def _serve(calls: Connection, namespace: dict[str, Any]) -> None:
    calls.send_bytes(pickle.dumps(Answer("ok", time.time())))
    while True:
        answer, result = _run(receive(calls), namespace)
        sys.stdout.flush()
        sys.stderr.flush()
        calls.send_bytes(pickle.dumps(answer))
        if result is not None:
            send(calls, result)


def _run(message: Message, namespace: dict[str, Any]) -> tuple[Answer, Message | None]:
    """Run one call. Whatever it raises, SystemExit included, is an answer and not our end."""
    if isinstance(dist.group.WORLD, MeterGroup):
        dist.group.WORLD.recorder.start_run()
    try:
        task: Task = unpack(message)
        for name, lines in task.sources.items():  # so that a traceback can quote a cell
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        first = (namespace,) if task.takes_namespace else ()
        result = task.fn(*first, *task.args, **task.kwargs)
    except BaseException as error:
        return Answer("raised", time.time(), _traceback(error), state()), None
    try:
        return Answer("ok", time.time(), state=state()), pack(result)
    except Exception as error:
        text = f"{type(result).__name__}: {error}"
        return Answer("result", time.time(), text, state()), None


def _traceback(error: BaseException) -> str:
    """The traceback from the learner's own first line on, without the frames that led there."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, cell.__file__):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def state() -> RankState:
    """What this rank has called and waits in, for the watchdog; read from any thread."""
    group = dist.group.WORLD
    if not isinstance(group, MeterGroup):
        return RankState([], [], [])
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.format_list(traceback.extract_stack(frame)) if frame else []
    recorder = group.recorder
    counts = recorder.calls(), recorder.calls_before
    return RankState(recorder.recent(), recorder.pending(), stack, *counts)


def _answer_questions(questions: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            questions.recv_bytes()
            questions.send_bytes(pickle.dumps(state()))


def _set_up(setup: Setup) -> None:
    os.environ.clear()
    os.environ.update(setup.environment)
    sys.path[:] = setup.path
    with contextlib.suppress(OSError):
        os.chdir(setup.cwd)
    torch.set_num_threads(1)
    if setup.backend == "nccl":
        torch.cuda.set_device(setup.rank)
    pdt.comm.init(
        setup.backend,
        link=setup.link,
        store=dist.TCPStore("127.0.0.1", setup.port, wait_for_workers=False),
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=timedelta(seconds=setup.timeout_s),
    )


def _redirect_output(output_fd: int) -> None:
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        binary = io.FileIO(fd, "w", closefd=False)
        text = io.TextIOWrapper(io.BufferedWriter(binary), "utf-8", "replace", line_buffering=True)
        setattr(sys, name, text)


def _die_with(server_pid: int) -> None:
    """On Linux the kernel kills a rank when its server ends; elsewhere the closed pipe ends it."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server_pid:  # the server ended before the call above took hold
        os._exit(1)
