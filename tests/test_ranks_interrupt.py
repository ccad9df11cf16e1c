"""Ctrl-C at every stage of a start, of a call and of an end leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from pdt.ranks.interrupt import interrupt_later

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

# Says when a stage begins, so that the interrupt falls into it on a machine of any speed.
STAGES = """
import sys, time
from pdt import Ranks
from pdt.ranks import launcher, pool
from pdt.ranks.call import Call

def announce(owner, name, stage):
    real = getattr(owner, name)
    def announced(*args, **kwargs):
        if stage == sys.argv[1]:
            print(stage, flush=True)
        return real(*args, **kwargs)
    setattr(owner, name, announced)

announce(launcher.ForkServer, "_receive", "server")
announce(launcher.ForkServer, "fork_rank", "fork")
announce(pool, "await_ready", "store")
announce(Call, "_collect", "call")
with Ranks(3, backend=sys.argv[2]) as ranks:
    ranks.run(time.sleep, 100)
"""


def marked(mark: str) -> list[str]:
    """The processes that were started, by whomever, with this mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " ")[:80])
        except OSError:
            pass
    return found


def shared_files() -> set[str]:
    return {*os.listdir("/dev/shm")} if os.path.isdir("/dev/shm") else set()


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "backend"),
    [("server", "gloo"), ("fork", "gloo"), ("store", "shm"), ("call", "gloo"), ("call", "shm")],
)
def test_an_interrupted_start_ends_soon_and_leaves_nothing(stage, backend):
    mark, files = uuid.uuid4().hex, shared_files()
    script = subprocess.Popen(
        [sys.executable, "-c", STAGES, stage, backend],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MARK": mark},
        start_new_session=True,
    )
    try:
        assert script.stdout is not None
        assert script.stdout.readline() == f"{stage}\n"
        os.killpg(script.pid, signal.SIGINT)  # to the whole group, as a terminal does
        _, errors = script.communicate(timeout=15)
        assert errors.splitlines()[-1] == "KeyboardInterrupt"
        assert errors.count("Traceback") == 1, errors
        assert script.returncode == -signal.SIGINT
        until_s = time.monotonic() + 5
        while marked(mark) and time.monotonic() < until_s:
            time.sleep(0.05)
        assert marked(mark) == []
        assert shared_files() <= files
    finally:
        script.kill()


# Sends itself a Ctrl-C at one line after the other of what the parent does.
SWEEP = """
import gc, os, signal, sys, time
import torch.distributed as dist
from pdt import Ranks
from pdt.ranks.launcher import fork_server

def attempt():
    with Ranks(2, backend="gloo") as ranks:
        ranks.run(dist.get_rank)

def lines_until(interrupted):
    count = 0
    def trace(frame, event, arg):
        nonlocal count
        if "/pdt/ranks/" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        if event == "line" and count == interrupted:
            signal.raise_signal(signal.SIGINT)
        return trace
    sys.settrace(trace)
    try:
        attempt()
    finally:
        sys.settrace(None)
    return count

def children():
    server = fork_server()._process.pid
    with open(f"/proc/{server}/task/{server}/children") as pids:
        return pids.read().split()

def left():
    until_s = time.monotonic() + 5
    while children() and time.monotonic() < until_s:
        time.sleep(0.005)
    gc.collect()
    return children(), len(os.listdir("/proc/self/fd")) - before

attempt()
server = fork_server()
lines, before = lines_until(0), len(os.listdir("/proc/self/fd"))
for line in range(int(sys.argv[1]), lines, int(sys.argv[2])):
    try:
        if lines_until(line) >= line:
            print(line, "was not interrupted")
    except KeyboardInterrupt:
        pass
    if left() != ([], 0):
        print(line, "left", *left())
with Ranks(2, backend="gloo") as ranks:
    print(ranks.run(dist.get_rank), fork_server() is server, lines > 100)
"""


@linux
@pytest.mark.slow
def test_an_interrupt_at_any_line_leaves_nothing_and_the_next_ranks_work():
    command = [sys.executable, "-c", SWEEP, "1", "11"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert (done.stdout, done.stderr) == ("[0, 1] True True\n", "")


def test_an_interrupt_waits_for_the_end_of_the_block():
    done = []

    def block():
        with interrupt_later():
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["inner"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_block_in_another_thread_leaves_the_handler_alone():
    seen = []

    def block():
        with interrupt_later():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join(10)
    assert seen == [signal.getsignal(signal.SIGINT)]
