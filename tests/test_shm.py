"""The shared-memory backend: torch's own results, the same bits everywhere, and nothing hangs."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pdt.comm.shm import ShmGroup

DTYPES = (
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    + [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    + [torch.complex64, torch.complex128]
)
SHAPES = [(), (0,), (7, 3), (5, 1031)]  # with slots of 4 KiB: no, one, and many pieces
SIZES = [1, 2, 3, 4]
_FOLDS = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@contextmanager
def shm_group(timeout_s: float = 20.0, **sizes: int) -> Iterator[dist.ProcessGroup]:
    """In a rank: all ranks as a shared-memory group that torch has made, without meter."""
    sizes = {"slot_nbytes": 4096, "letter_nbytes": 1024} | sizes

    def create(store, rank, size, timeout):
        return ShmGroup(store, rank, size, timedelta(seconds=timeout_s), **sizes)

    dist.Backend._plugins.pop("SHM_TEST", None)
    dist.Backend.register_backend("shm_test", create, devices=["cpu"])
    group = dist.new_group(backend="shm_test")
    yield group
    dist.destroy_process_group(group)


def made(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What `rank` contributes; every rank can compute it."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def by_rank(shape, dtype, salt=0):
    return [made(q, shape, dtype, salt) for q in range(dist.get_world_size())]


def folded(parts, op):
    """The reduction in the order of ranks; sums of 16-bit floats in float32, rounded once."""
    dtype = parts[0].dtype
    if op in ("SUM", "AVG", "PRODUCT") and dtype in (torch.float16, torch.bfloat16):
        parts = [part.float() for part in parts]
    fold = _FOLDS[op]
    total = parts[0]
    for part in parts[1:]:
        total = fold(total, part)
    return (total / len(parts) if op == "AVG" else total).to(dtype)


def ops_of(dtype):
    if dtype.is_complex:
        return ["SUM", "AVG", "PRODUCT"]
    if dtype.is_floating_point:
        return ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]
    return ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def same(found, expected, *what):
    assert torch.equal(found, expected), f"{what}: {found} is not {expected}"


def reductions(shm):
    """all_reduce, reduce and both reduce_scatters, every op, dtype and shape."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for shape in SHAPES:
            for name in ops_of(dtype):
                op, what = getattr(dist.ReduceOp, name), (dtype, shape, name)
                parts = by_rank(shape, dtype)
                total, mine = folded(parts, name), parts[rank].clone()
                # dist.all_reduce takes complex tensors apart, and then knows no PRODUCT of them.
                shm.allreduce([mine], op).wait()
                same(mine, total, "all_reduce", *what)
                mine = parts[rank].clone()
                options = dist.ReduceOptions()
                options.reduceOp, options.rootRank = op, n - 1
                shm.reduce([mine], options).wait()
                same(mine, total if rank == n - 1 else parts[rank], "reduce", *what)
                rows = by_rank((n, *shape), dtype)
                out = torch.empty(shape, dtype=dtype)
                options = dist.ReduceScatterOptions()
                options.reduceOp = op
                shm.reduce_scatter([out], [list(rows[rank])], options).wait()
                same(out, folded([row[rank] for row in rows], name), "reduce_scatter", *what)
                out = torch.empty((1, *shape), dtype=dtype)
                shm._reduce_scatter_base(out, rows[rank], options).wait()
                same(out[0], folded([row[rank] for row in rows], name), "base", *what)


def movements(shm):
    """Everything that moves elements without changing them, every dtype and shape."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for shape in SHAPES:
            parts, what = by_rank(shape, dtype), (dtype, shape)
            mine, root = parts[rank], n - 1
            found = mine.clone()
            dist.broadcast(found, root, group=shm)
            same(found, parts[root], "broadcast", *what)
            found = [torch.empty_like(mine) for _ in range(n)]
            dist.all_gather(found, mine, group=shm)
            same(torch.stack(found), torch.stack(parts), "all_gather", *what)
            found = torch.empty((n, *shape), dtype=dtype)
            dist.all_gather_into_tensor(found, mine.unsqueeze(0), group=shm)
            same(found, torch.stack(parts), "all_gather_into_tensor", *what)
            found = [torch.empty_like(mine) for _ in range(n)] if rank == root else None
            dist.gather(mine, found, dst=root, group=shm)
            if rank == root:
                same(torch.stack(found), torch.stack(parts), "gather", *what)
            found = torch.empty_like(mine)
            dist.scatter(found, parts if rank == root else None, src=root, group=shm)
            same(found, mine, "scatter", *what)
            rows = by_rank((n, *shape), dtype)
            found = [torch.empty(shape, dtype=dtype) for _ in range(n)]
            dist.all_to_all(found, list(rows[rank]), group=shm)
            expected = torch.stack([row[rank] for row in rows])
            same(torch.stack(found), expected, "all_to_all", *what)
            found = torch.empty_like(rows[rank])
            dist.all_to_all_single(found, rows[rank], group=shm)
            same(found, expected, "all_to_all_single", *what)


@pytest.mark.parametrize(
    "world_size", [n if n in (1, 3) else pytest.param(n, marks=pytest.mark.slow) for n in SIZES]
)
@pytest.mark.parametrize("check", [reductions, movements])
def test_every_collective_is_exact_for_every_dtype_and_shape(pool, world_size, check):
    def run():
        with shm_group() as shm:
            check(shm)

    pool(world_size).run(run)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("numel", [3, 5000, 300_000])
def test_all_ranks_hold_the_same_bits_and_agree_with_gloo(pool, world_size, numel):
    def run():
        with shm_group(slot_nbytes=1 << 18) as shm:
            mine = made(dist.get_rank(), (numel,), torch.float32)
            theirs = mine.clone()
            dist.all_reduce(mine, group=shm)
            dist.all_reduce(theirs)
            torch.testing.assert_close(mine, theirs)
            return mine

    results = pool(world_size).run(run)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_factor_scales_the_sum(pool):
    def run():
        with shm_group() as shm:
            mine = torch.ones(3000, dtype=torch.float16)
            shm.allreduce([mine], dist._make_nccl_premul_sum(0.5)).wait()
            same(mine, torch.full_like(mine, 1.5), "PREMUL_SUM")

    pool(3).run(run)


@pytest.mark.parametrize("world_size", SIZES)
def test_uneven_sizes_arrive_whole(pool, world_size):
    def run():
        rank, n = dist.get_rank(), dist.get_world_size()
        with shm_group() as shm:
            found = [torch.empty(900 * q) for q in range(n)]
            mine = [made(q, (900 * q,), torch.float32) for q in range(n)]
            dist.all_gather(found, mine[rank], group=shm)
            same(torch.cat(found), torch.cat(mine), "all_gather")
            rows = [[q * p * 500 for p in range(n)] for q in range(n)]  # rank 0 sends nothing
            sent = [made(q, (sum(rows[q]), 2), torch.float32) for q in range(n)]
            received = [rows[q][rank] for q in range(n)]
            out = torch.empty(sum(received), 2)
            dist.all_to_all_single(out, sent[rank], received, rows[rank], group=shm)
            expected = [sent[q].split(rows[q])[rank] for q in range(n)]
            same(out, torch.cat(expected), "all_to_all_single")

    pool(world_size).run(run)


def test_tensors_may_be_non_contiguous_and_require_gradients(pool):
    def run():
        rank, n = dist.get_rank(), dist.get_world_size()
        with shm_group() as shm:
            parts = by_rank((40, 50), torch.float32)
            whole = parts[rank].clone().requires_grad_()
            dist.all_reduce(whole.t(), group=shm)
            same(whole, folded(parts, "SUM"), "transposed")
            every_other = torch.zeros(40, 100)
            every_other[:, ::2] = parts[rank]
            dist.broadcast(every_other[:, ::2], 0, group=shm)
            same(every_other[:, ::2], parts[0], "strided")
            assert every_other[:, 1::2].eq(0).all()
            found = torch.empty(50, 40 * n).t()
            dist.all_gather_into_tensor(found, parts[rank], group=shm)
            same(found, torch.cat(parts), "gathered")
            in_place = torch.stack(by_rank((n, 3000), torch.float32))
            mine = in_place[rank].clone()
            dist.reduce_scatter_tensor(mine[rank], mine.view(-1), group=shm)
            same(mine[rank], folded(list(in_place[:, rank]), "SUM"), "in place")

    pool(3).run(run)


def test_calls_overlap_and_keep_their_order(pool):
    def run():
        rank = dist.get_rank()
        with shm_group() as shm:
            tensors = [torch.full((3000,), float(rank + i)) for i in range(20)]
            works = [dist.all_reduce(t, group=shm, async_op=True) for t in tensors]
            last = torch.ones(1)
            dist.all_reduce(last, group=shm)  # synchronous, behind twenty that are not
            assert all(work.is_completed() for work in works)
            futures = [work.get_future() for work in works]
            assert all(torch.equal(f.wait()[0], t) for f, t in zip(futures, tensors, strict=True))
            assert all(work.is_success() and work.exception() is None for work in works)
            return [t[0].item() for t in tensors]

    assert pool(3).run(run) == [[3.0 + 3 * i for i in range(20)]] * 3


def test_inputs_may_be_dropped_while_a_call_is_under_way(pool):
    """As torch promises of asynchronous calls; transposed ones are read from a copy."""

    def run():
        n, rank, wrong = dist.get_world_size(), dist.get_rank(), []

        def temporary(k):
            return torch.full((64, 48), float(100 * k + rank)).t()

        with shm_group() as group:
            calls = {
                "all_gather": lambda k: dist.all_gather(
                    out, temporary(k), group=group, async_op=True
                ),
                "all_to_all": lambda k: dist.all_to_all(
                    out, [temporary(k) for _ in range(n)], group=group, async_op=True
                ),
                "gather": lambda k: dist.gather(
                    temporary(k), out if rank == 0 else None, group=group, async_op=True
                ),
            }
            for name, call in calls.items():
                for k in range(5):
                    out = [torch.zeros(48, 64) for _ in range(n)]
                    work = call(k)
                    kept = [torch.full((48, 64), -1.0) for _ in range(8)]  # takes freed memory
                    work.wait()
                    right = [(part == 100 * k + q).all().item() for q, part in enumerate(out)]
                    if not all(right) and (name != "gather" or rank == 0):
                        wrong.append((name, k, len(kept)))
        return wrong

    assert pool(2).run(run) == [[], []]


def test_a_callback_may_call_again(pool):
    def run():
        with shm_group() as shm:
            again = torch.ones(5)

            def call(future):
                dist.all_reduce(again, group=shm)
                return future.value()

            work = dist.all_reduce(torch.ones(5000), group=shm, async_op=True)
            work.get_future().then(call).wait()
            return again[0].item()

    assert pool(2).run(run) == [2.0, 2.0]


def test_coalesced_calls_equal_single_ones(pool):
    def run():
        rank, n = dist.get_rank(), dist.get_world_size()
        with shm_group() as shm:
            parts = [by_rank((size,), torch.float32, size) for size in (3, 5000)]
            mine = [part[rank].clone() for part in parts]
            with dist._coalescing_manager(group=shm):
                for tensor in mine:
                    dist.all_reduce(tensor, group=shm)
            gathered = [torch.empty(n * part[0].numel()) for part in parts]
            shm.allgather_into_tensor_coalesced(gathered, mine).wait()
            scattered = [torch.empty_like(tensor) for tensor in mine]
            shm.reduce_scatter_tensor_coalesced(scattered, gathered).wait()
            for part, found, whole, piece in zip(parts, mine, gathered, scattered, strict=True):
                same(found, folded(part, "SUM"), "all_reduce")
                same(whole, found.repeat(n), "all_gather")
                same(piece, found * n, "reduce_scatter")

    pool(2).run(run)


@pytest.mark.parametrize("numel", [0, 1, 3000, 100_000])  # of 8 bytes, in letters of 1 KiB
def test_messages_between_all_pairs_at_once(pool, numel):
    def run():
        rank, n = dist.get_rank(), dist.get_world_size()
        with shm_group() as shm:
            peers = [q for q in range(n) if q != rank]
            inbox = {q: torch.empty(numel, dtype=torch.int64) for q in peers}
            works = [dist.isend(made(rank, (numel,), torch.int64), q, group=shm) for q in peers]
            works += [dist.irecv(inbox[q], q, group=shm) for q in reversed(peers)]
            for work in works:
                work.wait()
            for q in peers:
                same(inbox[q], made(q, (numel,), torch.int64), "from", q)

    pool(4).run(run)


def test_tags_and_unnamed_senders_find_their_messages(pool):
    def run():
        rank = dist.get_rank()
        with shm_group() as shm:
            if rank:
                for tag in (1, 2):
                    dist.send(torch.full((1000,), 10 * rank + tag), 0, group=shm, tag=tag)
                return []
            first, second = torch.empty(2, 1000, dtype=torch.int64)
            dist.recv(second, 2, group=shm, tag=2)  # while tag 1 lies before it
            src = dist.recv(first, group=shm, tag=1)
            other, rest = torch.empty(2, 1000, dtype=torch.int64)
            assert dist.recv(other, group=shm, tag=1) == 3 - src
            dist.recv(rest, 1, group=shm, tag=2)
            return [second[0].item(), sorted([first[0].item(), other[0].item()]), rest[0].item()]

    assert pool(3).run(run)[0] == [22, [11, 21], 12]


def test_messages_pass_while_a_collective_waits(pool):
    def run():
        rank = dist.get_rank()
        with shm_group() as shm:
            total = torch.ones(10)
            if rank == 0:
                work = dist.all_reduce(total, group=shm, async_op=True)
            token = torch.full((1,), rank)
            if rank == 0:
                dist.send(token + 41, 1, group=shm)
                dist.recv(token, 1, group=shm)
                work.wait()
            else:
                dist.recv(token, 0, group=shm)
                dist.send(token + 1, 0, group=shm)
                dist.all_reduce(total, group=shm)
            return token.item(), total[0].item()

    assert pool(2).run(run) == [(42, 2.0), (41, 2.0)]


def raised(call) -> str:
    """The text of the error that `call` raises."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def unequal_numel(rank, n, shm):
    dist.all_reduce(torch.ones(10_000 + rank), group=shm)


def unequal_dtype(rank, n, shm):
    dist.broadcast(torch.ones(10, dtype=torch.float64 if rank else torch.float32), 0, group=shm)


def unequal_operation(rank, n, shm):
    if rank == 1:
        dist.barrier(group=shm)
    else:
        dist.all_reduce(torch.ones(3), group=shm)


def unequal_reduction(rank, n, shm):
    dist.all_reduce(torch.ones(3), op=[dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank % 2], group=shm)


def unequal_root(rank, n, shm):
    dist.reduce(torch.ones(3), rank % 2, group=shm)


def unequal_parts(rank, n, shm):
    outs = [torch.empty(2 + (q == n - 1)) for q in range(n)]
    dist.all_gather(outs, torch.ones(2), group=shm)


def unequal_splits(rank, n, shm):
    splits = [1] * (n - 1) + [1 + (rank == 0)]
    dist.all_to_all_single(torch.empty(n), torch.ones(sum(splits)), [1] * n, splits, group=shm)


def undefined_reduction(rank, n, shm):
    dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND, group=shm)


def undivided(rank, n, shm):
    dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * n + 1), group=shm)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (unequal_numel, ["10000 float32", "10001 float32", "rank 1"]),
        (unequal_dtype, ["10 float32", "10 float64"]),
        (unequal_operation, ["rank 1: barrier", "rank 0: all_reduce SUM of 3 float32"]),
        (unequal_reduction, ["SUM", "MAX"]),
        (unequal_root, ["reduce SUM to 0", "reduce SUM to 1"]),
        (unequal_parts, ["do not fit", "3"]),
        (unequal_splits, ["rank 0 sends 8 bytes to rank 2", "expects 4"]),
        (undefined_reduction, ["BAND", "float32"]),
        (undivided, ["7 rows cannot be divided equally among 3"]),
    ],
)
def test_a_mistake_is_named_on_every_rank_and_the_group_goes_on(pool, mistake, words):
    def run():
        with shm_group() as shm:
            text = raised(lambda: mistake(dist.get_rank(), dist.get_world_size(), shm))
            after = torch.ones(2000)
            dist.all_reduce(after, group=shm)
            return text, after.sum().item()

    for text, total in pool(3).run(run):
        assert all(word in text for word in words), text
        assert total == 6000


def test_a_message_of_another_size_is_refused_by_the_receiver(pool):
    def run():
        rank = dist.get_rank()
        with shm_group() as shm:
            if rank == 0:
                dist.send(torch.ones(5000), 1, group=shm)
                dist.send(torch.ones(3), 1, group=shm)
                return "", 3
            text = raised(lambda: dist.recv(torch.empty(4999), 0, group=shm))
            after = torch.empty(3)
            dist.recv(after, 0, group=shm)
            return text, after.sum().item()

    (_, _), (text, after) = pool(2).run(run)
    assert "rank 0 sent 20000 bytes" in text
    assert "expects 19996 bytes" in text
    assert after == 3


def test_other_memory_is_refused_by_name(pool):
    def run():
        with shm_group() as shm:
            sparse = torch.eye(3).to_sparse()
            return raised(lambda: shm.allreduce([sparse]).wait())

    assert all("dense CPU tensors" in text for text in pool(2).run(run))


def test_whoever_does_not_come_is_named_in_time(pool):
    def run():
        rank = dist.get_rank()
        with shm_group(timeout_s=0.5) as shm:
            text = "" if rank == 1 else raised(lambda: dist.all_reduce(torch.ones(3), group=shm))
            dist.barrier()
            later = "" if rank == 1 else raised(lambda: dist.barrier(group=shm))
            return text, later

    for rank, (text, later) in enumerate(pool(3).run(run)):
        if rank != 1:
            assert "all_reduce SUM" in text
            assert "ranks [1] have not come" in text or "gave up" in text
            assert "failed before" in later


def test_an_error_reaches_the_future(pool):
    def run():
        rank = dist.get_rank()
        with shm_group() as shm:
            work = dist.all_reduce(torch.ones(3 + rank), group=shm, async_op=True)
            text = raised(lambda: work.get_future().wait())
            return text, raised(work.wait), work.is_success(), type(work.exception()).__name__

    for text, waited, success, kind in pool(2).run(run):
        assert "4 float32" in text
        assert "4 float32" in waited
        assert not success
        assert kind == "RuntimeError"


_BARE = """
import faulthandler, os, signal, time
from datetime import timedelta
import torch, torch.distributed as dist
from pdt.comm.shm import ShmGroup

def launch(world_size, body):
    global store  # lives as long as this process
    pipes, pids = [], []
    for rank in range(world_size):
        port, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            faulthandler.dump_traceback_later(80, exit=True)
            store = dist.TCPStore("127.0.0.1", int(os.read(port, 9)), None, False)
            group = ShmGroup(store, rank, world_size, timedelta(seconds=60))
            group.barrier().wait()
            try:
                body(rank, group)
            except RuntimeError as error:
                os.write(1, f"rank {rank}: {error}\\n".encode())  # a line in one piece
            os._exit(0)
        pipes.append(writer), pids.append(pid)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for writer in pipes:
        os.write(writer, str(store.port).encode())
    return pids
"""


def bare(code: str) -> subprocess.CompletedProcess:
    """Run code in a fresh process that forks its own ranks, so that they may be killed."""
    script = _BARE + textwrap.dedent(code)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks after importing torch")
@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_rank_is_named_at_once(reaped):
    found = bare(
        f"""
        def body(rank, group):
            if rank == 1:
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            start = time.monotonic()
            try:
                group.allreduce([torch.ones(1 << 20)]).wait()
            finally:
                os.write(1, f"waited {{time.monotonic() - start}}\\n".encode())  # one piece
        pids = launch(3, body)
        for pid in [pids[1], pids[0], pids[2]] if {reaped} else [pids[0], pids[2], pids[1]]:
            os.waitpid(pid, 0)
        """
    ).stdout
    lines = [line for line in found.splitlines() if line.startswith("rank")]
    assert len(lines) == 2
    assert all("all_reduce SUM" in line for line in lines)
    assert any("rank 1 has died" in line for line in lines)
    waits = [float(x.split()[1]) for x in found.splitlines() if x.startswith("waited")]
    assert max(waits) < 30


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks after importing torch")
def test_nothing_is_left_when_all_ranks_are_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = set(os.listdir("/dev/shm"))
    bare(
        """
        def body(rank, group):
            group.allreduce([torch.ones(1 << 20)]).wait()
            os.kill(os.getpid(), signal.SIGKILL)
        for pid in launch(4, body):
            os.waitpid(pid, 0)
        """
    )
    assert not list(tmp_path.iterdir())
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "pdt" in name]


@pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")
def test_waiting_uses_no_core(pool):
    def run():
        import time

        rank = dist.get_rank()
        with shm_group() as shm:
            dist.barrier(group=shm)
            if rank == 1:
                time.sleep(1.0)
            start = time.process_time()
            dist.barrier(group=shm)
            return time.process_time() - start

    assert pool(2).run(run)[0] < 0.3  # of the second that it waited
