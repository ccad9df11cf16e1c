"""States in files, a few in memory: as if all were there, never more than the window, in order."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections import defaultdict

import pytest
import torch
from torch.optim.adamw import adamw

from pdt.comm import Link
from pdt.measure.timeline import Timeline
from pdt.offload.aligned import is_aligned
from pdt.offload.files import DamagedFile, TensorFiles
from pdt.offload.nvme import Item, SwapWindow

NUMELS = [1000, 1, 0, 127, 129, 4097, 64]
ITEMS = {f"bucket{i}": Item(numel) for i, numel in enumerate(NUMELS)}
SLOW = Link(0.0, 10e6)  # LARGE takes 10 ms
LARGE = {f"bucket{i}": Item(25_600, ("master",)) for i in range(6)}  # 102,400 bytes each
BUFFERS = pytest.mark.parametrize("num_buffers", [1, 2, 3, 10])


@pytest.fixture
def files(tmp_path):
    with TensorFiles(tmp_path) as store:
        yield store


def start(name, item):
    """The planes of an item at the beginning, each different."""
    seed = torch.arange(item.numel, dtype=torch.float64)
    return {p: (seed * 7 + len(name) + i).to(item.dtype) for i, p in enumerate(item.planes)}


def filled(window):
    for name, item in window.items.items():
        window.put(name, start(name, item))
    window.drain()
    window.events.clear()
    window.files.clear()
    return window


def read(window, name):
    with window.item(name, write=False) as planes:
        return {plane: values.clone() for plane, values in planes.items()}


def eventually(condition, within_s=10.0):
    end_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.002)
    return condition()


def step(number, master, exp_avg, exp_avg_sq, grad):
    steps = [torch.tensor(float(number))]
    settings = {"beta1": 0.9, "beta2": 0.99, "lr": 0.01, "weight_decay": 0.1, "eps": 1e-8}
    states = ([grad], [exp_avg], [exp_avg_sq], [], steps)
    adamw([master], *states, amsgrad=False, maximize=False, foreach=False, **settings)


@BUFFERS
def test_states_in_files_are_stepped_as_in_memory(files, num_buffers):
    held = {}
    with SwapWindow(files, ITEMS, num_buffers=num_buffers) as window:
        for name, item in ITEMS.items():
            held[name] = {p: torch.zeros(item.numel) for p in item.planes}
            window.put(name, held[name])
        for number in range(1, 4):
            window.plan(ITEMS)
            for i, (name, item) in enumerate(ITEMS.items()):
                grad = torch.arange(item.numel) * 0.01 - i + number
                with window.item(name) as planes:
                    step(number - 1, **planes, grad=grad)
                step(number - 1, **held[name], grad=grad)
        for name, expected in held.items():
            found = read(window, name)
            assert all(torch.equal(found[plane], expected[plane]) for plane in expected)
            assert not expected["master"].numel() or expected["master"].any()


@BUFFERS
def test_no_more_buffers_than_the_window_and_always_the_same(files, num_buffers):
    seen, largest = set(), max(item.nbytes for item in ITEMS.values())
    with filled(SwapWindow(files, ITEMS, num_buffers=num_buffers)) as window:
        assert window.nbytes == num_buffers * largest
        for _ in range(3):
            window.plan(ITEMS)
            for name in ITEMS:
                with window.item(name) as planes:
                    assert 1 <= window.live <= num_buffers
                    if planes["master"].numel():
                        seen.add(planes["master"].data_ptr())
                        assert is_aligned(planes["master"])
                    assert all(plane.data_ptr() % 64 == 0 for plane in planes.values())
        window.drain()
        assert window.live == 0
        assert window.peak_live <= num_buffers
        assert 1 <= len(seen) <= num_buffers


@BUFFERS
def test_an_item_is_read_once_and_written_once_a_step(files, num_buffers):
    with filled(SwapWindow(files, ITEMS, num_buffers=num_buffers)) as window:
        for _ in range(2):
            window.plan(ITEMS)
            for name in ITEMS:
                with window.item(name):
                    pass
        window.drain()
        nbytes = 2 * sum(item.nbytes for item in ITEMS.values())
        for direction in ("read", "write"):
            assert files.nbytes(direction) == nbytes
            assert files.calls(direction) == 2 * len(ITEMS)
        window.plan(ITEMS)
        for name in ITEMS:
            with window.item(name, write=False):
                pass
        assert files.calls("write") == 2 * len(ITEMS)


@BUFFERS
def test_a_buffer_is_not_read_into_before_it_has_been_written(tmp_path, num_buffers):
    with TensorFiles(tmp_path, link=Link(0.001, 100e6)) as files:
        with filled(SwapWindow(files, LARGE, num_buffers=num_buffers)) as window:
            names = list(LARGE) * 2
            window.plan(names)
            for name in names:
                with window.item(name):
                    pass
            window.drain()
            events = sorted(window.events)
    life = defaultdict(list)
    for event in events:
        if event.what != "stall":
            life[event.buffer].append(event)
    for known in life.values():
        assert [e.what for e in known] == ["read", "use", "write"] * (len(known) // 3)
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(known))
        assert all(len({e.name for e in known[i : i + 3]}) == 1 for i in range(0, len(known), 3))
    assert [e.name for e in events if e.what == "use"] == names
    assert sum(e.what == "read" for e in events) == len(names)


@BUFFERS
def test_what_is_planned_again_is_read_after_it_was_written(files, num_buffers):
    names = ["bucket0", "bucket1", "bucket1", "bucket0", *LARGE, *LARGE]
    with filled(SwapWindow(files, LARGE, num_buffers=num_buffers)) as window:
        window.plan(names)
        for name in names:
            with window.item(name) as planes:
                planes["master"] += 1
        for name, item in LARGE.items():
            expected = start(name, item)["master"] + names.count(name)
            assert torch.equal(read(window, name)["master"], expected)


def test_what_comes_next_is_read_while_an_item_is_used(files):
    def done(what):
        return [e.name for e in sorted(window.events) if e.what == what]

    with filled(SwapWindow(files, LARGE, num_buffers=3)) as window:
        window.plan(LARGE)
        with window.item("bucket0"):
            assert eventually(lambda: len(done("read")) == 3)
            assert window.live == 3
        with window.item("bucket1"):  # nothing is called, and yet one is written and one is read
            assert eventually(lambda: len(done("read")) == 4)
            assert done("write") == ["bucket0"]
            assert sorted(done("read")) == ["bucket0", "bucket1", "bucket2", "bucket3"]
            assert window.live == 3


def test_stalls_vanish_with_depth(tmp_path):
    stall_s, walk_s = {}, {}
    for num_buffers in (1, 2, 3):
        with TensorFiles(tmp_path, link=SLOW) as files:
            with filled(SwapWindow(files, LARGE, num_buffers=num_buffers)) as window:
                start_s = time.perf_counter()
                window.plan(LARGE)
                for name in LARGE:
                    with window.item(name):
                        time.sleep(0.015)
                walk_s[num_buffers] = time.perf_counter() - start_s
                stall_s[num_buffers] = window.stall_s
    assert stall_s[1] > 6 * 0.01 + 5 * 0.01  # each read, and each write but the last
    assert stall_s[2] < 0.75 * stall_s[1]  # a read is hidden, a write is not
    assert stall_s[3] < 0.45 * stall_s[1]  # nearly only the first read is left
    assert walk_s[3] < walk_s[1]


def test_a_walk_is_drawn_as_a_timeline(files):
    with filled(SwapWindow(files, LARGE)) as window:
        window.plan(LARGE)
        for name in LARGE:
            with window.item(name):
                pass
        window.drain()
        spans = window.spans(rank=1)
    assert {(s.lane, s.kind) for s in spans} == {("read", "read"), ("host", "use"), ("write",) * 2}
    assert {s.nbytes for s in spans} == {102_400}
    assert Timeline(spans).ranks == [1]


def test_a_plan_may_come_long_before(files):
    with filled(SwapWindow(files, LARGE, num_buffers=2)) as window:
        window.plan(["bucket3"])
        window.plan(["bucket1", "bucket3"])
        assert eventually(lambda: len(window.events) == 2)
        for name in ("bucket3", "bucket1", "bucket3"):
            with window.item(name) as planes:
                planes["master"] += 1
        window.drain()
        expected = start("bucket3", LARGE["bucket3"])["master"] + 2
        assert torch.equal(read(window, "bucket3")["master"], expected)
        assert window.stall_s < 60


def test_each_item_has_its_own_planes_and_dtype(files):
    items = {
        "sgd": Item(1000, ("master", "momentum")),
        "half": Item(333, ("weight",), torch.bfloat16),
        "double": Item(77, ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"), torch.float64),
    }
    with filled(SwapWindow(files, items, num_buffers=1)) as window:
        for name, item in items.items():
            found, expected = read(window, name), start(name, item)
            assert list(found) == list(item.planes)
            assert all(torch.equal(found[plane], expected[plane]) for plane in item.planes)
            assert {t.dtype for t in found.values()} == {item.dtype}


@BUFFERS
def test_an_exception_leaves_the_file_and_the_buffers(files, num_buffers):
    with filled(SwapWindow(files, LARGE, num_buffers=num_buffers)) as window:
        window.plan(LARGE)
        with window.item("bucket0") as planes:
            planes["master"] += 1
        with pytest.raises(ZeroDivisionError), window.item("bucket1") as planes:
            planes["master"].add_(1).div_(1 / 0)  # half of a step has been done
        assert eventually(lambda: window.live == 0)
        for name in LARGE:
            expected = start(name, LARGE[name])["master"] + (name == "bucket0")
            assert torch.equal(read(window, name)["master"], expected)


def test_an_item_out_of_turn_is_refused(files):
    with filled(SwapWindow(files, LARGE, num_buffers=2)) as window:
        window.plan(["bucket0", "bucket1"])
        with pytest.raises(ValueError, match="'bucket1' is asked for, and the plan says 'bucket0'"):
            window.item("bucket1").__enter__()
        with pytest.raises(RuntimeError, match="put 'bucket5' while items are planned"):
            window.put("bucket5", start("bucket5", LARGE["bucket5"]))
        with window.item("bucket0"):
            with pytest.raises(RuntimeError, match="'bucket1' is asked for while 'bucket0' is in"):
                window.item("bucket1").__enter__()
            with pytest.raises(RuntimeError, match="drain while 'bucket0' is in use"):
                window.drain()
        with window.item("bucket1"):
            pass
        for call in (lambda: window.plan(["other"]), lambda: window.item("other").__enter__()):
            with pytest.raises(ValueError, match="'other' is none of the window's 6 items"):
                call()
    with pytest.raises(ValueError, match="num_buffers=0"):
        SwapWindow(files, LARGE, num_buffers=0)


def test_planes_that_do_not_fit_are_refused_by_name(files):
    with filled(SwapWindow(files, LARGE, num_buffers=1)) as window:
        with pytest.raises(ValueError, match=r"'bucket1': the planes are \('master',\), got"):
            window.put("bucket1", {"exp_avg": torch.zeros(25_600)})
        with pytest.raises(ValueError, match="'bucket1': a plane has 25600 elements, got"):
            window.put("bucket1", {"master": torch.zeros(25_601)})
        window.put("bucket1", {"master": torch.ones(100, 256)})
        assert read(window, "bucket1")["master"].all()


def test_a_file_that_cannot_be_read_is_named_in_its_turn(files):
    with filled(SwapWindow(files, LARGE, num_buffers=2)) as window:
        os.truncate(files.path("bucket1"), files.path("bucket1").stat().st_size - 1)
        window.plan(LARGE)
        with window.item("bucket0"):
            pass
        with pytest.raises(DamagedFile, match=r"bucket1\.tensor has"):
            window.item("bucket1").__enter__()
        assert eventually(lambda: window.live == 0)
        with window.item("bucket2"):
            pass
    with SwapWindow(files, {"new": Item(5)}) as window:
        with pytest.raises(KeyError, match="'new' has not been written"):
            window.item("new").__enter__()


def test_a_write_that_fails_is_told_by_the_next_call(tmp_path, monkeypatch):
    def refuse(fd, views, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with TensorFiles(tmp_path, direct=False) as files:
        with filled(SwapWindow(files, LARGE, num_buffers=2)) as window:
            window.plan(["bucket0", "bucket1", "bucket2"])
            with monkeypatch.context() as patched:
                with window.item("bucket0"):
                    patched.setattr(os, "pwritev", refuse)
                with pytest.raises(OSError, match="cannot write 'bucket0': No space left"):
                    window.drain()
            window.close()
            assert window.live == 0
            for name in set(LARGE) - {"bucket0"}:
                assert torch.equal(read(window, name)["master"], start(name, LARGE[name])["master"])
            with pytest.raises(RuntimeError, match="'bucket0' is lost"):
                read(window, "bucket0")


def test_a_closed_store_ends_the_walk(tmp_path):
    files = TensorFiles(tmp_path, link=Link(0.02, 100e6))
    window = filled(SwapWindow(files, LARGE, num_buffers=2))
    window.plan(LARGE)
    with window.item("bucket0"):
        pass
    start_s = time.monotonic()
    files.close()  # while what comes next waits for the write to end
    assert time.monotonic() - start_s < 10
    with pytest.raises(RuntimeError, match="read 'bucket2': the store is closed"):
        window.item("bucket1").__enter__()
    with window.item("bucket1", write=False):  # it had been read before
        pass
    with pytest.raises(RuntimeError, match="read 'bucket3': the store is closed"):
        window.item("bucket3").__enter__()
    window.close()
    assert window.live == 0
