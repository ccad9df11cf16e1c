"""Tensors in files: every bit comes back, in order, and nothing stays behind."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdt.comm import Link
from pdt.measure.timeline import Timeline
from pdt.offload import aligned
from pdt.offload.aligned import BLOCK_NBYTES, BOUNCE_NBYTES, aligned_empty, is_aligned
from pdt.offload.files import TensorFiles

DTYPES = [
    torch.bfloat16,
    torch.float32,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
]
NUMELS = [0, 1, 127, 128, 129, 4097]
DIRECT = pytest.mark.parametrize("direct", [None, False], ids=["direct", "cached"])


def noise(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    real = torch.randint(-100, 100, (*shape, dtype.itemsize), generator=generator)
    return (
        real.to(torch.uint8).view(dtype).reshape(shape) if dtype != torch.bool else real[..., 0] > 0
    )


def same_bits(a, b):
    # not torch.equal, for which NaN differs from itself
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def bits(tensor):
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    return bytes(whole.reshape(-1).view(torch.uint8).tolist())


@pytest.fixture
def store(tmp_path):
    with TensorFiles(tmp_path) as files:
        yield files


def there_and_back(files, tensor, out):
    files.write("tensor", tensor)
    files.read("tensor", out).wait()
    return same_bits(out, tensor)


@DIRECT
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size_and_dtype_comes_back_bit_for_bit(tmp_path, dtype, direct):
    with TensorFiles(tmp_path, direct=direct) as files:
        for numel in NUMELS:
            tensor = noise((numel,), dtype, seed=numel)
            assert there_and_back(files, tensor, torch.empty_like(tensor))
            there = aligned_empty(numel, dtype)
            there.copy_(tensor)
            assert there_and_back(files, there, aligned_empty(numel, dtype))


@DIRECT
def test_what_is_not_aligned_takes_a_detour(tmp_path, direct):
    numel = 2 * BOUNCE_NBYTES + 12345
    whole = noise((numel + 1,), torch.uint8)
    with TensorFiles(tmp_path, direct=direct) as files:
        for begin, end in [(1, numel + 1), (1, BOUNCE_NBYTES + 1), (3, 2 * BOUNCE_NBYTES + 3)]:
            source = aligned_empty(numel + 1, torch.uint8)
            source.copy_(whole)
            target = aligned_empty(numel + 1, torch.uint8)
            assert not is_aligned(source[begin:end])
            assert there_and_back(files, source[begin:end], target[begin:end])
            assert not target[:begin].any()  # what lies around it is let alone
            assert not target[end:].any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.25),
        lambda: noise((6, 7)).t(),
        lambda: noise((5, 9))[:, ::2],
        lambda: noise((2, 3, 4, 5)).to(memory_format=torch.channels_last),
        lambda: torch.zeros(3, 0, 2),
        lambda: torch.randn(4, 3, dtype=torch.complex64).conj(),
        lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
        lambda: torch.nn.Parameter(torch.randn(3, 3)),
    ],
)
def test_any_layout_comes_back_into_any_layout(store, make):
    tensor = make()
    assert there_and_back(store, tensor, torch.zeros_like(tensor))
    assert there_and_back(store, tensor, torch.zeros(tensor.shape, dtype=tensor.dtype))
    if tensor.dim() == 2:
        turned = torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).t()
        assert there_and_back(store, tensor, turned)


def test_aligned_memory_begins_at_a_page_and_is_the_tensors_alone():
    for dtype in DTYPES:
        for numel in NUMELS:
            tensor = aligned_empty(numel, dtype)
            assert (tensor.dtype, tensor.shape) == (dtype, (numel,))
            assert is_aligned(tensor) or not numel
            assert not tensor.any()
    first, second = aligned_empty(8, torch.float32), aligned_empty(8, torch.float32)
    first.fill_(1)
    assert not second.any()


@DIRECT
@pytest.mark.parametrize("limit", [512, 1000, 4096, 70_000])
def test_short_reads_and_writes_go_on(tmp_path, monkeypatch, direct, limit):
    calls = []

    def short(move):
        def moved(fd, views, offset):
            calls.append(offset)
            return min(limit, move(fd, views, offset))

        return moved

    tensor, out = noise((100_001,)), aligned_empty(100_001, torch.float32)
    with TensorFiles(tmp_path, direct=direct) as files:
        monkeypatch.setattr(os, "pwritev", short(os.pwritev))
        monkeypatch.setattr(os, "preadv", short(os.preadv))
        assert there_and_back(files, tensor, out)
    assert len(calls) > 2 * tensor.nbytes / limit


@DIRECT
@pytest.mark.parametrize("durable", [False, True])
def test_a_write_takes_the_place_of_the_one_before_whatever_its_size(tmp_path, direct, durable):
    with TensorFiles(tmp_path, direct=direct) as files:
        for number, numel in enumerate([5000, 1, 0, 70_000, 3]):
            tensor, out = noise((numel,), seed=number), torch.empty(numel)
            files.write("tensor", tensor, durable=durable)
            files.read("tensor", out).wait()
            assert same_bits(out, tensor)
            blocks = math.ceil(tensor.nbytes / BLOCK_NBYTES) + 2
            assert files.path("tensor").stat().st_size == blocks * BLOCK_NBYTES
        assert [p.name for p in files.folder.glob("*.tensor*")] == ["tensor.tensor"]


def test_transfers_of_one_name_happen_in_the_order_of_the_calls(tmp_path):
    with TensorFiles(tmp_path, threads=8) as files:
        outs = {}
        for number in range(40):
            for name in "abc":
                files.write(name, torch.full((100,), float(number)))
                outs[name, number] = torch.empty(100)
                files.read(name, outs[name, number])
        files.flush()
    assert all((out == number).all() for (_, number), out in outs.items())


def test_other_names_do_not_wait(tmp_path):
    with TensorFiles(tmp_path, threads=2, link=Link(0.0, 1e6)) as files:
        slow = files.write("slow", torch.zeros(75_000))  # 0.3 s
        files.delete("other")
        with pytest.raises(KeyError, match="'other' is not in"):
            files.delete("other").wait()
        assert not slow.is_completed()
        slow.wait()
        with pytest.raises(KeyError):
            files.flush()  # the first deletion, for which nobody waited


def test_an_emulated_disk_takes_its_time_and_one_transfer_at_a_time(tmp_path):
    with TensorFiles(tmp_path, link=Link(0.01, 40e6)) as files:
        tensors = [torch.zeros(100_000) for _ in range(3)]  # 10 ms each
        for number, tensor in enumerate(tensors):
            files.write(str(number), tensor)
        files.flush()
        spans = files.spans(rank=2)
    spans.sort()
    assert [(s.lane, s.nbytes, s.rank) for s in spans] == [("write", 400_000, 2)] * 3
    assert all(s.duration_s >= 0.02 for s in spans)
    starts = [s.start_s for s in spans]
    assert all(b - a >= 0.00999 for a, b in pairwise(starts))
    assert Timeline(spans).busy("write")[2] >= 0.04  # 3 of 10 ms, and one latency


def test_bytes_and_calls_are_counted(store):
    store.write("a", torch.zeros(10))
    store.write("b", torch.zeros(6, dtype=torch.int64))
    store.read("a", torch.empty(10)).wait()
    assert (store.nbytes("write"), store.calls("write")) == (88, 2)
    assert (store.nbytes("read"), store.calls("read")) == (40, 1)
    store.flush()
    store.clear()
    assert (store.nbytes("read"), store.calls("write"), store.spans()) == (0, 0, [])
    with pytest.raises(ValueError, match="direction='to disk'"):
        store.nbytes("to disk")


def test_names_may_hold_anything_that_fits(store):
    names = ["a/b", "..", ".", "a b", "ä", "%2F", "layer.0.weight/exp_avg", "x" * 240]
    for number, name in enumerate(names):
        store.write(name, torch.tensor(number))
    assert store.names() == sorted(names)
    for number, name in enumerate(names):
        store.read(name, out := torch.tensor(-1)).wait()
        assert out == number
    store.delete("a/b").wait()
    assert store.names() == sorted(names[1:])
    with pytest.raises(KeyError, match="'a/b' has not been written"):
        store.read("a/b", torch.tensor(0)).wait()
    for wrong in ("", "x" * 241):
        with pytest.raises(ValueError, match="fit a file's name"):
            store.write(wrong, torch.tensor(0))


def test_what_does_not_fit_is_refused_by_name(store):
    store.write("w", torch.zeros(3, 4)).wait()
    for out in (torch.zeros(4, 3), torch.zeros(12), torch.zeros(3, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"holds torch.float32 \(3, 4\)"):
            store.read("w", out).wait()
    for wrong in (torch.zeros(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(ValueError, match="'w': files take dense tensors of the host"):
            store.write("w", wrong)


def test_direct_says_what_is_done_and_may_be_insisted_on(tmp_path, monkeypatch):
    with TensorFiles(tmp_path, direct=False) as files:
        assert not files.direct
        assert "kernel's cache" in repr(files)
    monkeypatch.setattr(aligned, "_DIRECT", 0)  # as where the system has none
    with TensorFiles(tmp_path) as files:
        assert not files.direct
        assert there_and_back(files, noise((5000,)), torch.empty(5000))
    with pytest.raises(ValueError, match="does not take O_DIRECT"):
        TensorFiles(tmp_path, direct=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="threads=0"):
        TensorFiles(tmp_path, threads=0)


def test_a_kept_store_is_found_again_and_has_one_owner(tmp_path):
    tensor = noise((1000,))
    with TensorFiles(tmp_path / "kept", keep=True) as files:
        files.write("w", tensor)
        with pytest.raises(RuntimeError, match="belongs to a store that is open"):
            TensorFiles(tmp_path / "kept", keep=True)
    with TensorFiles(tmp_path / "kept", keep=True) as files:
        assert files.names() == ["w"]
        files.read("w", out := torch.empty(1000)).wait()
        assert same_bits(out, tensor)
        files.write("w", tensor + 1)
        files.read("w", out).wait()
        assert same_bits(out, tensor + 1)


def test_a_store_that_is_not_kept_leaves_nothing(tmp_path):
    (tmp_path / "mine").write_text("stays")
    before = threading.active_count()
    files = TensorFiles(tmp_path)
    files.write("w", torch.zeros(10))
    watcher = files._folder._watcher
    files.close()
    files.close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert watcher.poll() is not None
    assert threading.active_count() == before
    for call in (files.write, files.read):
        with pytest.raises(RuntimeError, match="'w': the store is closed"):
            call("w", torch.zeros(10))


def test_a_store_that_nobody_holds_ends_after_its_work(tmp_path):
    before = threading.active_count()
    files = TensorFiles(tmp_path / "kept", keep=True, link=Link(0.05, math.inf))
    tensor = noise((1000,))
    files.write("w", tensor)
    del files
    gc.collect()
    assert threading.active_count() == before
    with TensorFiles(tmp_path / "kept", keep=True) as files:
        files.read("w", out := torch.empty(1000)).wait()
        assert same_bits(out, tensor)


def test_tensors_are_held_only_until_their_transfer_is_over(tmp_path):
    class Memory(bytearray):
        """Of which it can be told when nobody holds it."""

    with TensorFiles(tmp_path, link=Link(0.05, math.inf)) as files:
        memory = Memory(4000)
        freed = weakref.ref(memory)
        transfer = files.write("w", torch.frombuffer(memory, dtype=torch.float32))
        del memory
        gc.collect()
        assert freed() is not None
        transfer.wait()
        end_s = time.monotonic() + 5
        while freed() is not None and time.monotonic() < end_s:
            time.sleep(0.01)
        assert freed() is None


def test_a_forked_child_neither_uses_nor_removes_the_files(store):
    store.write("w", torch.ones(3)).wait()
    child = os.fork()
    if child == 0:  # pragma: no cover
        status = 1
        try:
            store.write("w", torch.zeros(3))
        except RuntimeError as error:
            status = 0 if "make a store here" in str(error) else 2
        try:
            store.close()
        except BaseException:
            status = 3
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.read("w", out := torch.zeros(3)).wait()
    assert out.all()


def test_what_an_owner_and_its_watcher_have_left_goes_with_the_next_store(tmp_path):
    left = tmp_path / "pdt-tensors-left"
    left.mkdir()
    (left / "w.tensor").write_bytes(b"x")
    with TensorFiles(tmp_path) as first, TensorFiles(tmp_path) as second:
        assert not left.exists()
        assert {p.name for p in tmp_path.iterdir()} == {first.folder.name, second.folder.name}


def test_any_sequence_of_calls_is_as_with_a_dict(store):
    @settings(max_examples=40, deadline=None)
    @given(
        calls=st.lists(
            st.tuples(
                st.sampled_from("ab"),
                st.sampled_from(["write", "durable", "read", "delete"]),
                st.integers(0, 9000),
            ),
            max_size=12,
        )
    )
    def run(calls):
        held, waiting = {}, []
        for name in store.names():
            store.delete(name)
        for number, (name, call, numel) in enumerate(calls):
            if call in ("write", "durable"):
                held[name] = noise((numel,), torch.uint8, seed=number)
                store.write(name, held[name], durable=call == "durable")
            elif name in held and call == "read":
                out = torch.empty_like(held[name])
                waiting.append((store.read(name, out), out, held[name]))
            elif name in held:
                del held[name]
                store.delete(name)
        for transfer, out, expected in waiting:
            transfer.wait()
            assert torch.equal(out, expected)
        assert store.names() == sorted(held)

    run()
