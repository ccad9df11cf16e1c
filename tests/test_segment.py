"""Segments: shared, sparse, without a name that could leak, and safe to close at any time."""

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pdt.segment import Segment, exchange

linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfd is Linux's")


def test_what_one_writes_the_other_reads():
    with Segment.create(4096) as mine:
        yours = Segment.open(mine.path)
        mine.tensor(torch.float32, 3, offset=64).copy_(torch.tensor([1.0, 2.0, 3.0]))
        assert yours.nbytes == 4096
        assert yours.tensor(torch.float32, 3, offset=64).tolist() == [1.0, 2.0, 3.0]


@linux
def test_another_process_opens_the_path(pool):
    def write(path):
        Segment.open(path).tensor(torch.int64, 1).fill_(42)
        return os.getpid()

    with Segment.create(4096) as mine:
        assert pool(1).run(write, mine.path) != [os.getpid()]
        assert mine.tensor(torch.int64, 1).item() == 42


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.int64])
def test_every_dtype_has_its_view(dtype):
    with Segment.create(1024) as segment:
        assert segment.tensor(dtype, 7, offset=16).fill_(1).ne(0).sum() == 7
        assert segment.tensor(dtype, 0).shape == (0,)


def test_a_view_outlives_close():
    segment = Segment.create(1 << 20)
    view = segment.tensor(torch.float32, 1 << 18).fill_(3)
    segment.close()
    segment.close()
    gc.collect()
    assert view.sum() == 3 * (1 << 18)
    with pytest.raises(ValueError, match="closed"):
        segment.tensor(torch.float32, 1)


@linux
def test_memory_is_committed_only_when_touched():
    with Segment.create(1 << 36) as segment:  # 64 GiB
        segment.tensor(torch.uint8, 10, offset=1 << 35).fill_(1)
        assert os.stat(segment.path).st_blocks * 512 < 1 << 22


@linux
def test_close_gives_descriptors_and_memory_back():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        mine = Segment.create(4096)
        yours = Segment.open(mine.path)
        mine.close()
        yours.close()
    del mine, yours
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_memfd_the_file_goes_once_unlinked(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    mine = Segment.create(4096)
    yours = Segment.open(mine.path)
    assert Path(mine.path).exists()
    mine.unlink()
    assert not Path(mine.path).exists()
    mine.tensor(torch.int32, 1).fill_(5)
    assert yours.tensor(torch.int32, 1).item() == 5


@pytest.mark.parametrize(("nbytes", "numel", "offset"), [(0, 1, 0), (16, 5, 0), (16, 1, 16)])
def test_a_bad_size_is_refused(nbytes, numel, offset):
    with pytest.raises(ValueError):
        Segment.create(nbytes).tensor(torch.float32, numel, offset)


def _exchange(world_size, nbytes_of, timeout_s=10.0):
    """`exchange` by threads of this process; the result or the error by rank."""
    store, results = dist.HashStore(), [None] * world_size

    def run(rank):
        try:
            results[rank] = exchange(store, "key", rank, world_size, nbytes_of(rank), timeout_s)
        except RuntimeError as error:
            results[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank,)) for rank in range(world_size) if nbytes_of(rank)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


@pytest.mark.parametrize("memfd", [True, False])
def test_exchange_gives_everyone_everything(monkeypatch, memfd):
    if not memfd:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    results = _exchange(3, lambda rank: 4096)
    for rank in range(3):
        results[rank][rank].tensor(torch.int64, 1).fill_(rank + 1)
    for segments in results:
        assert [s.tensor(torch.int64, 1).item() for s in segments] == [1, 2, 3]
    assert memfd or not any(Path(s.path).exists() for s in results[0])


def test_a_rank_that_does_not_come_is_named():
    results = _exchange(3, lambda rank: 4096 if rank != 1 else 0, timeout_s=0.3)
    assert all("ranks [1] did not come" in str(results[rank]) for rank in (0, 2))


def test_unequal_sizes_are_named_on_every_rank():
    results = _exchange(2, lambda rank: 4096 * (rank + 1))
    assert all("cannot open the shared memory of rank" in str(error) for error in results)


def test_a_wrong_file_behind_the_path_is_refused(monkeypatch):
    import pdt.segment as module

    inode, calls = module._inode, []
    monkeypatch.setattr(module, "_inode", lambda p: calls.append(p) or inode(p) + len(calls))
    results = _exchange(2, lambda rank: 4096)
    assert all("PID namespace" in str(error) for error in results)
