"""When a rank raises, dies or hangs: who, where, why, and the next call works."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from pdt import RankError, Ranks

ENDS_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4, backend="gloo", timeout_s=60) as ranks:
        yield ranks


def fails(ranks: Ranks, fn) -> RankError:
    """The error of a call that must fail soon; and the next call must work."""
    started_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(fn)
    assert time.monotonic() - started_s < ENDS_WITHIN_S
    assert ranks.run(dist.get_rank) == [0, 1, 2, 3]
    return caught.value


def test_one_rank_that_raises_is_named_with_its_traceback(ranks):
    def fn():
        if dist.get_rank() == 1:
            raise ValueError("boom")
        dist.all_reduce(torch.ones(3))

    error = fails(ranks, fn)
    assert (error.rank, error.kind) == (1, "raised")
    assert error.text.splitlines()[0] == "Traceback (most recent call last):"
    assert "in fn" in error.text.splitlines()[1]
    assert error.text.splitlines()[-1] == "ValueError: boom"


def test_the_earliest_exception_is_the_root_cause(ranks):
    def fn():
        time.sleep(0.3 * dist.get_rank())
        raise ValueError(f"from {dist.get_rank()}")

    error = fails(ranks, fn)
    assert error.rank == 0
    assert "3 more ranks" in error.headline


def test_a_chained_cause_is_shown(ranks):
    def fn():
        try:
            {}["key"]
        except KeyError as error:
            raise RuntimeError("outer") from error

    assert "KeyError: 'key'" in fails(ranks, fn).text


def test_an_exception_that_cannot_be_pickled_is_text(ranks):
    def fn():
        class Local(Exception):
            def __reduce__(self):
                raise TypeError

        raise Local("inner")

    assert "Local: inner" in fails(ranks, fn).text


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL, as the kernel does when memory"),
        (lambda: os._exit(0), "exit code 0"),
        pytest.param(
            lambda: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV", marks=pytest.mark.slow
        ),
        pytest.param(lambda: os._exit(3), "exit code 3", marks=pytest.mark.slow),
    ],
    ids=["SIGKILL", "exit 0", "SIGSEGV", "exit 3"],
)
def test_a_rank_that_dies_is_the_root_cause(ranks, end, words):
    def fn():
        if dist.get_rank() == 2:
            end()
        dist.all_reduce(torch.ones(3))  # the others see a closed connection

    error = fails(ranks, fn)
    assert (error.rank, error.kind) == (2, "died")
    assert words in error.headline


def test_a_rank_that_dies_between_calls_is_named(ranks):
    pid = ranks.run(os.getpid)[3]
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.1)
    assert fails(ranks, dist.get_rank).rank == 3


def test_sys_exit_in_a_rank_is_an_exception(ranks):
    def fn():
        if dist.get_rank() == 2:
            sys.exit(3)

    error = fails(ranks, fn)
    assert (error.rank, error.kind, error.text.splitlines()[-1]) == (2, "raised", "SystemExit: 3")


def test_memory_that_runs_out_is_an_error_and_not_a_hang(ranks):
    def fn():
        import resource

        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
            torch.empty(2**36)

    error = fails(ranks, fn)
    assert error.rank == 1
    assert "alloc" in error.text


def test_a_skipped_collective_is_read_off_the_table(ranks):
    ranks.run(dist.barrier)  # of another run: does not count

    def fn():
        for _ in range(3):
            if not (_ == 2 and dist.get_rank() == 1):
                dist.all_reduce(torch.ones(2, 5))

    error = fails(ranks, fn)
    assert error.kind == "hung"
    assert (
        "ranks 0, 2, 3 wait in all_reduce #3: rank 1 has returned without making that call"
        in error.text
    )
    row = next(line for line in error.text.splitlines() if line.strip().startswith("0 "))
    assert row.split()[1] == "3"
    assert "(2, 5) float32" in row
    assert "1, 2, 3" in row
    assert "in fn" in error.text


def test_another_collective_is_read_off_the_table(ranks):
    def fn():
        if dist.get_rank() == 1:
            dist.broadcast(torch.ones(1), 1)
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(1))

    error = fails(ranks, fn)
    assert "rank 1" in error.text


def test_two_ranks_that_both_send_first_are_named(ranks):
    def fn():
        peer = dist.get_rank() ^ 1
        dist.send(torch.ones(10), peer)
        dist.recv(torch.ones(10), peer)

    error = fails(ranks, fn)
    assert "rank 0 waits in send #1 to 1: rank 1 waits in send #1 to 0" in error.text


def test_a_receive_that_nobody_sends_to_is_named(ranks):
    def fn():
        if dist.get_rank() == 0:
            dist.recv(torch.ones(3), 1)

    error = fails(ranks, fn)
    expected = "rank 0 waits in recv #1 from 1: rank 1 has returned without making that call"
    assert expected in error.text


@pytest.mark.slow
def test_a_rank_that_computes_is_not_called_deadlocked(ranks):
    def fn():
        if dist.get_rank() == 1:
            time.sleep(3)
        dist.barrier()
        return dist.get_rank()

    assert ranks.run(fn) == [0, 1, 2, 3]


def test_the_time_out_ends_a_call_and_shows_each_rank():
    def fn():
        if dist.get_rank() == 1:
            while True:
                pass
        dist.barrier()

    with Ranks(2, backend="gloo", timeout_s=1.5) as ranks:
        started_s = time.monotonic()
        with pytest.raises(RankError, match=r"no answer within 1\.5 s") as caught:
            ranks.run(fn)
        assert time.monotonic() - started_s < 1.5 + ENDS_WITHIN_S
        assert "rank 0 waits in barrier #1: rank 1 has not made that call" in caught.value.text
        assert "running" in caught.value.text
        assert ranks.run(dist.get_rank) == [0, 1]


@pytest.mark.slow
def test_a_stopped_rank_is_said_not_to_answer():
    def fn():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    with Ranks(2, backend="gloo", timeout_s=1.5) as ranks:
        with pytest.raises(RankError) as caught:
            ranks.run(fn)
        assert "not answering" in caught.value.text
        assert ranks.run(dist.get_rank) == [0, 1]


@pytest.mark.slow
def test_a_rank_stuck_in_c_code_shows_its_stack(capsys):
    def fn():
        if dist.get_rank() == 1:
            sum(range(10**12))  # holds the interpreter lock in C

    with Ranks(2, backend="gloo", timeout_s=1.5) as ranks:
        with pytest.raises(RankError, match="no answer"):
            ranks.run(fn)
    assert "in fn" in capsys.readouterr().out


def test_an_interrupt_ends_the_ranks_and_the_next_call_works():
    with Ranks(2, backend="gloo") as ranks:
        pids = ranks.run(os.getpid)
        main = threading.main_thread().ident
        timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        started_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ranks.run(lambda: dist.get_rank() == 1 or dist.barrier())
        assert time.monotonic() - started_s < ENDS_WITHIN_S
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        assert ranks.run(dist.get_rank) == [0, 1]


def test_ranks_outlive_an_exception_that_left_them_alike(ranks):
    pids = ranks.run(os.getpid)

    def fn():
        dist.all_reduce(torch.ones(1))
        raise KeyError

    with pytest.raises(RankError):
        ranks.run(fn)
    assert ranks.run(os.getpid) == pids

    def uneven():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1), async_op=True)
        raise KeyError

    with pytest.raises(RankError):
        ranks.run(uneven)
    assert set(ranks.run(os.getpid)).isdisjoint(pids)


def test_the_error_can_be_pickled():
    import pickle

    error = pickle.loads(pickle.dumps(RankError(2, "hung", "headline", "text")))
    assert (error.rank, error.kind, str(error)) == (2, "hung", "headline\ntext")
