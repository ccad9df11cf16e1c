"""The emulated wire takes its time, uses no core meanwhile, and rewards overlap."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdt import Ranks
from pdt.comm import Link, meter
from pdt.comm.cost import time_s

SLOW = Link(latency_s=5e-3, bandwidth=20e6)
TWO_NODES = Link(2e-3, 10e6, ranks_per_node=2, inside=Link(1e-3, 100e6))


@pytest.fixture(scope="module")
def slow():
    with Ranks(2, backend="gloo", link=SLOW) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two_nodes():
    with Ranks(4, backend="gloo", link=TWO_NODES) as ranks:
        yield ranks


def timed(fn, repeats=5, of=statistics.median):
    """Median (or least) seconds of `fn` in a rank, all ranks starting together."""
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        started_s = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - started_s)
    return of(seconds)


@pytest.mark.parametrize("nbytes", [1_000_000, 4_000_000])
def test_an_all_reduce_takes_its_alpha_beta_time_within_ten_percent(slow, nbytes):
    tensor = torch.ones(nbytes // 4)
    expected_s = time_s("all_reduce", nbytes, 2, SLOW)
    for seconds in slow.run(lambda: timed(lambda: dist.all_reduce(tensor), of=min)):
        assert 0.99 * expected_s < seconds < 1.1 * expected_s


OPS = {
    "all_gather": lambda t: dist.all_gather([t.clone(), t.clone()], t),
    "reduce_scatter": lambda t: dist.reduce_scatter(t.clone(), [t.clone(), t.clone()]),
    "broadcast": lambda t: dist.broadcast(t, 0),
    "all_to_all": lambda t: dist.all_to_all_single(torch.empty_like(t), t),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_each_collective_takes_the_time_of_its_law(slow, op):
    tensor = torch.ones(200_000)

    def fn():
        with meter() as m:
            OPS[op](tensor)
        return timed(lambda: OPS[op](tensor)), m.records[0].nbytes

    for seconds, nbytes in slow.run(fn):
        expected_s = time_s(op, nbytes, 2, SLOW)
        assert 0.99 * expected_s < seconds < 1.2 * expected_s


def test_a_message_takes_its_time_from_when_it_is_sent(slow):
    message_s = time_s("send", 400_000, 2, SLOW)

    def fn():
        tensor = torch.ones(100_000)
        dist.barrier()
        started_s = time.perf_counter()
        if dist.get_rank() == 0:
            time.sleep(0.1)
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        return time.perf_counter() - started_s

    sent_s, received_s = slow.run(fn)
    assert 0.1 + message_s < received_s + 0.01 < 0.1 + 1.5 * message_s + 0.01
    assert sent_s < received_s


def test_a_late_rank_delays_the_transfer_of_all(slow):
    expected_s = time_s("all_reduce", 400_000, 2, SLOW)

    def fn():
        tensor = torch.ones(100_000)
        dist.barrier()
        started_s = time.perf_counter()
        time.sleep(0.2 * dist.get_rank())
        dist.all_reduce(tensor)
        return time.perf_counter() - started_s

    assert min(slow.run(fn)) > 0.2 + 0.99 * expected_s


def test_transfers_of_one_rank_share_its_link_in_order(slow):
    expected_s = time_s("all_reduce", 400_000, 2, SLOW)

    def fn():
        tensors = [torch.ones(100_000) for _ in range(4)]
        ended = []
        dist.barrier()
        started_s = time.perf_counter()
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
            ended.append(time.perf_counter() - started_s)
        return ended

    for ended in slow.run(fn):
        for k, seconds in enumerate(ended, start=1):
            assert 0.99 * k * expected_s < seconds < 1.3 * k * expected_s


def test_groups_of_one_rank_share_its_link(slow):
    expected_s = time_s("all_reduce", 400_000, 2, SLOW)

    def fn():
        group = dist.new_group()
        tensors = torch.ones(100_000), torch.ones(100_000)
        dist.barrier()
        started_s = time.perf_counter()
        works = [
            dist.all_reduce(tensors[0], async_op=True),
            dist.all_reduce(tensors[1], group=group, async_op=True),
        ]
        for work in works:
            work.wait()
        return time.perf_counter() - started_s

    assert min(slow.run(fn)) > 1.98 * expected_s


def test_many_senders_queue_at_one_receiver():
    link = Link(1e-3, 20e6)

    def fn():
        tensor = torch.ones(100_000)
        dist.barrier()
        started_s = time.perf_counter()
        if dist.get_rank() == 0:
            for work in [dist.irecv(tensor.clone(), peer) for peer in (1, 2)]:
                work.wait()
        else:
            dist.send(tensor, 0)
        return time.perf_counter() - started_s

    with Ranks(3, backend="gloo", link=link) as ranks:
        received_s, *sent_s = ranks.run(fn)
    port_s = 400_000 / link.bandwidth
    assert received_s > 2 * port_s
    assert min(sent_s) < 1.6 * port_s  # each sender's own port carries one message


def test_waiting_uses_no_core(slow):
    def fn():
        tensor = torch.ones(1_000_000)
        dist.barrier()
        started = time.perf_counter(), time.process_time()
        dist.all_reduce(tensor)
        return time.perf_counter() - started[0], time.process_time() - started[1]

    for wall_s, cpu_s in slow.run(fn):
        assert wall_s > 0.2
        assert cpu_s < 0.5 * wall_s


def test_a_link_changes_no_result(two_nodes):
    def fn():
        torch.manual_seed(dist.get_rank())
        tensor = torch.randn(1000, dtype=torch.float64)
        mine = tensor.clone()
        dist.all_reduce(tensor)
        pieces = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(pieces, mine)
        return torch.allclose(tensor, sum(pieces)), dist.all_gather_object([None] * 4, 1)

    assert all(equal for equal, _ in two_nodes.run(fn))


def test_two_nodes_are_fast_inside_and_slow_between(two_nodes):
    def fn():
        inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
        across = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
        tensor = torch.ones(100_000)
        return [timed(lambda g=g: dist.all_reduce(tensor, group=g)) for g in (inside, across)]

    for inside_s, across_s in two_nodes.run(fn):
        assert across_s > 0.99 * time_s("all_reduce", 400_000, 2, TWO_NODES)
        assert inside_s < 0.5 * across_s


@pytest.mark.slow
def test_torch_s_own_ddp_overlaps_on_it():
    """Buckets that leave during backward hide behind it; one all-reduce at the end does not."""
    link = Link(1e-4, 40e6)

    def fn():
        torch.manual_seed(0)
        layers = [nn.Linear(512, 512) for _ in range(8)]
        model, x = nn.Sequential(*layers), torch.randn(512, 512)
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)

        def overlapped():
            ddp(x).sum().backward()

        def naive():
            model(x).sum().backward()
            flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
            dist.all_reduce(flat)

        return timed(overlapped), timed(naive)

    with Ranks(2, backend="gloo", link=link) as ranks:
        for overlapped_s, naive_s in ranks.run(fn):
            assert overlapped_s < naive_s


def test_a_link_under_nccl_is_refused():
    from pdt.comm import init

    with pytest.raises(ValueError, match="link is for gloo and shm"):
        init("nccl", link=SLOW)
