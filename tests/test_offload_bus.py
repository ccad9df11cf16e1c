"""The bus: what it copies, how long it takes, what it counts, and that it ends."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from pdt.comm import Link
from pdt.measure import Timeline
from pdt.offload import Bus, bus_of


def threads() -> int:
    return sum(thread.name == "pdt-bus" for thread in threading.enumerate())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_copies_both_ways_whatever_the_strides(dtype: torch.dtype) -> None:
    with Bus() as bus:
        source = torch.arange(12).view(3, 4).t().to(dtype)
        host = bus.empty(12, dtype).view(4, 3)
        back = torch.zeros(4, 6, dtype=dtype)[:, ::2]
        bus.to_host([(source, host)]).wait()
        bus.to_device([(host, back)]).wait()
        assert torch.equal(back, source)


def test_a_transfer_takes_what_the_link_says_and_no_core() -> None:
    nbytes, link = 1 << 20, Link(latency_s=5e-3, bandwidth=50e6)
    expected_s = link.latency_s + nbytes / link.bandwidth
    with Bus(link) as bus:
        source, target = torch.ones(nbytes // 4), bus.empty(nbytes // 4, torch.float32)
        used_s, started_s = time.thread_time(), time.perf_counter()
        bus.to_host([(source, target)]).wait()
        assert time.perf_counter() - started_s >= expected_s
        assert time.thread_time() - used_s < expected_s / 2
        span = bus.spans()[0]
        assert span.lane == "to host"
        assert span.duration_s >= expected_s


def test_directions_run_side_by_side_and_each_in_order() -> None:
    with Bus(Link(0.0, 4e5 / 100e-3)) as bus:  # 100 ms each
        device, host = torch.ones(100_000), bus.empty(100_000, torch.float32)
        other = torch.zeros(100_000)
        ups = [bus.to_host([(device, host)], f"up {i}") for i in range(2)]
        downs = [bus.to_device([(other, torch.empty_like(other))], f"down {i}") for i in range(2)]
        for transfer in (*ups, *downs):
            transfer.finish()
        assert ups[0].end_s <= ups[1].start_s
        assert downs[0].end_s <= downs[1].start_s
        assert downs[0].start_s < ups[0].end_s
        assert ups[0].start_s < downs[0].end_s
        timeline = Timeline(bus.spans())
    assert timeline.busy("to host")[0] >= 200e-3
    assert timeline.busy("to device")[0] >= 200e-3


def test_counts_bytes_and_calls_until_it_is_cleared() -> None:
    with Bus() as bus:
        pair = (torch.ones(10), bus.empty(10, torch.float32))
        bus.to_host([pair, pair])
        bus.to_device([pair]).wait()
        assert (bus.nbytes("to host"), bus.calls("to host")) == (80, 1)
        assert (bus.nbytes("to device"), bus.calls("to device")) == (40, 1)
        bus.clear()
        assert (bus.nbytes("to host"), bus.calls("to device"), bus.spans()) == (0, 0, [])
        with pytest.raises(ValueError, match="'up' is neither"):
            bus.nbytes("up")


def test_tensors_are_let_go_of_when_they_have_been_carried() -> None:
    with Bus() as bus:
        source = torch.ones(10)
        gone = weakref.ref(source)
        transfer = bus.to_host([(source, bus.empty(10, torch.float32))])
        del source
        transfer.wait()
        gc.collect()
        assert gone() is None


def test_threads_end_with_the_bus_and_with_its_last_user() -> None:
    before = threads()
    pair = (torch.ones(3), torch.empty(3))
    with Bus() as bus:
        bus.to_host([pair]).wait()
        bus.to_device([pair]).wait()
        assert threads() == before + 2
    unclosed = Bus()
    unclosed.to_host([pair]).wait()
    del unclosed
    gc.collect()
    deadline_s = time.perf_counter() + 5
    while threads() > before and time.perf_counter() < deadline_s:
        time.sleep(1e-3)
    assert threads() == before
    bus.to_host([pair]).wait()  # a closed one starts anew
    bus.close()


def test_wrong_shapes_are_refused_and_errors_reach_who_waits() -> None:
    with Bus() as bus:
        with pytest.raises(ValueError, match=r"weights to host: .*\(3,\) does not go .* \(4,\)"):
            bus.to_host([(torch.ones(3), torch.ones(4))], "weights")
        transfer = bus.to_device([(torch.ones(2), torch.empty(2, device="meta").expand(2))])
        transfer.wait()  # meta takes everything
        overlapping = torch.empty(1).expand(2)
        with pytest.raises(RuntimeError):
            bus.to_device([(torch.ones(2), overlapping)]).wait()
        bus.to_host([(torch.ones(2), torch.empty(2))]).wait()  # and it goes on


def test_a_cpu_has_an_emulated_bus() -> None:
    link = Link(1e-3, 1e9)
    assert bus_of(torch.device("cpu"), link).link is link


@pytest.mark.gpu
def test_cuda_copies_on_streams_of_its_own() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    bus = bus_of(device)
    source = torch.randn(1 << 20, device=device)
    host = bus.empty(1 << 20, torch.float32)
    assert host.is_pinned()
    bus.to_host([(source * 2, host)]).wait()  # after what the current stream has been told
    torch.testing.assert_close(host, source.cpu() * 2)
    back = torch.empty_like(source)
    bus.to_device([(host, back)]).wait()  # the current stream waits, the host does not
    assert torch.equal(back, source * 2)
    assert {span.lane for span in bus.spans()} == {"to host", "to device"}
    assert all(span.duration_s > 0 for span in bus.spans())
