"""Nothing is left behind, however the parent ends; and the server is a safe place to fork from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each test starts an interpreter and a server that import torch

PARENT = """
import os, sys, threading, time
import torch
import torch.distributed as dist
from pdt import Ranks
from pdt.ranks.launcher import fork_server

ranks = Ranks(2, backend={backend!r})
print(fork_server()._process.pid, *ranks.run(os.getpid), flush=True)
{then}
"""


def parent(then: str, backend: str = "gloo") -> tuple[subprocess.Popen, list[int]]:
    """A process with live ranks, and the pids of its server and ranks."""
    code = PARENT.format(then=textwrap.dedent(then), backend=backend)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate()[1])
    return process, [int(pid) for pid in line.split()]


def rest(process: subprocess.Popen, timeout_s: float = 120.0) -> tuple[str, str]:
    """What the parent prints from now to its end, on stdout and stderr."""
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        # Not communicate(): it would lose what readline() has read ahead.
        return process.stdout.read(), process.stderr.read()
    finally:
        timer.cancel()
        process.wait(20)


def gone(pids: list[int], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() and not _zombie(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return False


def shared_files() -> set[str]:
    return {*os.listdir("/dev/shm")} if os.path.isdir("/dev/shm") else set()


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@linux
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_killed_parent_leaves_nothing(backend):
    before = shared_files()
    process, pids = parent(
        """
        def hang():
            if dist.get_rank() == 0:
                dist.barrier()
            else:
                while True:
                    pass
        ranks.run(hang)
        """,
        backend,
    )
    time.sleep(0.5)
    process.kill()
    process.communicate(timeout=20)
    assert gone(pids)
    assert shared_files() <= before


@linux
def test_an_interrupt_reaches_the_parent_and_not_the_ranks():
    process, pids = parent(
        """
        try:
            ranks.run(time.sleep, 60)
        except KeyboardInterrupt:
            print(ranks.run(dist.get_rank), flush=True)
        """
    )
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    assert rest(process) == ("[0, 1]\n", "")
    assert gone(pids)


# Says what became of each stage, in a line of its own.
LIFE = """
import signal
from pdt import RankError
print("threads", len(os.listdir(f"/proc/{fork_server()._process.pid}/task")))
def count():
    return len(os.listdir("/proc/self/fd"))
before = count()
for _ in range(3):
    with Ranks(3, backend="gloo") as more:
        pids = more.run(os.getpid)
print("closed", count() - before, [pid for pid in pids if os.path.exists(f"/proc/{pid}")])
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    try:
        ranks.run(os.getpid)
    except RuntimeError as error:
        print("foreign", "fork of it" in str(error))
    with Ranks(1, backend="gloo") as own:
        print("own", own.run(dist.get_rank), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print("after", ranks.run(dist.get_rank))
torch.set_num_threads(4)
big = torch.randn(600, 600)
(big @ big).sum()
with Ranks(2, backend="gloo") as more:
    print("multiplied", more.run(lambda: (big @ big).shape))
os.kill(fork_server()._process.pid, signal.SIGKILL)
time.sleep(0.5)
try:
    ranks.run(dist.get_rank)
except RankError as error:
    print("killed", error.kind)
print("replaced", ranks.run(dist.get_rank))
print("pids", fork_server()._process.pid, *ranks.run(os.getpid))
"""


@pytest.fixture(scope="module")
def life() -> dict[str, str]:
    """What a parent says of itself, from its start to its normal end, by stage."""
    process, pids = parent(LIFE)
    output, errors = rest(process)
    lines = dict(line.split(" ", 1) for line in output.splitlines())
    pids += map(int, lines.get("pids", "").split())
    return {**lines, "end": f"{process.returncode} {errors!r} {gone(pids)}"}


@linux
def test_a_killed_server_takes_its_ranks_along_and_is_replaced(life):
    assert (life["killed"], life["replaced"]) == ("died", "[0, 1]")


@linux
def test_a_parent_that_ends_normally_leaves_nothing_and_says_nothing(life):
    assert life["end"] == "0 '' True"


@linux
def test_closing_leaves_no_descriptor_and_no_process(life):
    assert life["closed"] == "0 []"


@linux
def test_the_server_has_one_thread_so_forking_it_is_safe(life):
    assert life["threads"] == "1"


@linux
def test_ranks_work_after_the_parent_has_used_many_threads(life):
    assert life["multiplied"] == "[torch.Size([600, 600]), torch.Size([600, 600])]"


@linux
def test_a_fork_of_the_parent_cannot_use_its_ranks_but_can_make_its_own(life):
    assert (life["foreign"], life["own"], life["after"]) == ("True", "[0]", "[0, 1]")


def test_a_start_that_fails_is_an_error_with_the_reason(monkeypatch):
    from pdt import RankError, Ranks
    from pdt.ranks import process

    whole = process._setup
    monkeypatch.setattr(process, "_setup", lambda *args: replace(whole(*args), backend="nope"))
    with pytest.raises(RankError, match=r"rank 0 could not start \(exit code 1\)") as caught:
        Ranks(1, backend="gloo")
    assert "'nope' is not one of gloo, nccl, shm" in caught.value.text
