"""Every byte is counted: this package's collectives, torch's own, and all that stands on them."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdt import RankError, Ranks
from pdt.comm import Link, meter

FLOAT = 4


def counted(fn, *args):
    """Run `fn` under the meter in a rank; (op, calls, nbytes, wire_nbytes) per operation."""
    with meter() as m:
        fn(*args)
    assert all(record.end_s >= record.start_s for record in m.records)
    return {op: (t.calls, t.nbytes, t.wire_nbytes) for op in m.ops() for t in [m.total(op)]}


COLLECTIVES = {  # on 4 ranks: the call on rank r, and what it should count there
    "all_reduce": (lambda r: dist.all_reduce(torch.ones(8)), (1, 32, 48.0)),
    "broadcast": (lambda r: dist.broadcast(torch.ones(8), 1), (1, 32, 24.0)),
    "reduce": (lambda r: dist.reduce(torch.ones(8), 2), (1, 32, 24.0)),
    "all_gather": (
        lambda r: dist.all_gather([torch.ones(2) for _ in range(4)], torch.ones(2)),
        (1, 32, 24.0),
    ),
    "all_gather into": (
        lambda r: dist.all_gather_into_tensor(torch.ones(8), torch.ones(2)),
        (1, 32, 24.0),
    ),
    "reduce_scatter": (
        lambda r: dist.reduce_scatter(torch.ones(2), [torch.ones(2) for _ in range(4)]),
        (1, 32, 24.0),
    ),
    "reduce_scatter tensor": (
        lambda r: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(8)),
        (1, 32, 24.0),
    ),
    "all_to_all": (
        lambda r: dist.all_to_all_single(torch.ones(8), torch.ones(8)),
        (1, 32, 24.0),
    ),
    "gather": (
        lambda r: dist.gather(
            torch.ones(2), [torch.ones(2) for _ in range(4)] if r == 1 else None, dst=1
        ),
        (1, 32, 6.0),
    ),
    "scatter": (
        lambda r: dist.scatter(
            torch.ones(2), [torch.ones(2) for _ in range(4)] if r == 1 else None, src=1
        ),
        (1, 32, 6.0),
    ),
    "barrier": (lambda r: dist.barrier(), (1, 0, 0.0)),
}


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_collective_counts_its_payload_and_its_wire_bytes(pool, backend, name):
    call, expected = COLLECTIVES[name]
    result = pool(4, backend=backend).run(lambda: counted(call, dist.get_rank()))
    assert result == [{name.split()[0]: expected}] * 4


def test_messages_count_where_they_are_sent(pool):
    def fn():
        peer = dist.get_rank() ^ 1
        with meter() as m:
            if dist.get_rank() == 0:
                dist.send(torch.ones(3), peer)
            else:
                dist.recv(torch.ones(3), peer)
            other = torch.ones(2, dtype=torch.int64)
            ops = [dist.P2POp(dist.isend, other, peer), dist.P2POp(dist.irecv, other + 0, peer)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        return [(r.op, r.nbytes, r.wire_nbytes, r.peer, r.shape, r.dtype) for r in m.records]

    first, second = pool(2).run(fn)
    assert first[0] == ("send", 12, 12.0, 1, (3,), "float32")
    assert second[0] == ("recv", 12, 0.0, 0, (3,), "float32")
    assert first[1:] == [("send", 16, 16.0, 1, (2,), "int64"), ("recv", 16, 0.0, 1, (2,), "int64")]


def test_a_receive_from_any_source_counts(pool):
    def fn():
        with meter() as m:
            if dist.get_rank() == 0:
                buffer = torch.zeros(1)
                return dist.recv(buffer), buffer.item(), m.records[0].label
            dist.send(torch.full((1,), 7.0), 0)

    assert pool(2).run(fn)[0] == (1, 7.0, "recv #1 from any")


def test_calls_are_numbered_by_group_and_pair(pool):
    def fn():
        group = dist.new_group([0, 1])
        with meter() as m:
            dist.barrier()
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() < 2:
                dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        return [(r.op, r.group_size, r.ranks) for r in m.records], [r.seq for r in m.records]

    with Ranks(3, backend="gloo") as ranks:
        zero, _, two = ranks.run(fn)
    assert zero[0][2] == ("all_reduce", 2, (0, 1))
    assert zero[1][1] == zero[1][0] + 1
    assert zero[1][2] == 1
    assert len(two[0]) == 2


def test_blocks_nest_and_end(pool):
    def fn():
        with meter() as outer:
            dist.barrier()
            with meter() as inner:
                dist.barrier()
        dist.barrier()
        return len(outer), len(inner)

    assert pool(2).run(fn) == [(2, 1)] * 2


def test_an_asynchronous_call_ends_when_it_ends_and_not_when_it_is_waited_for(pool):
    def fn():
        dist.barrier()
        with meter() as m:
            work = dist.all_reduce(torch.ones(4), async_op=True)
            time.sleep(0.5)
            work.wait()
        return m.records[0].end_s - m.records[0].start_s

    assert max(pool(2).run(fn)) < 0.4


def test_who_wakes_from_a_future_finds_the_end_in_the_record(pool):
    def fn():
        stamped = []
        for _ in range(200):
            with meter() as m:
                dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()
                stamped.append(m.records[0].end_s is not None)
        return all(stamped)

    for backend in ("gloo", "shm"):
        assert pool(2, backend=backend).run(fn) == [True, True]
    with Ranks(2, backend="gloo", link=Link(1e-5, 1e9)) as linked:
        assert linked.run(fn) == [True, True]


def test_a_failure_reaches_who_waits_for_the_future(pool):
    def fn():
        work = dist.all_reduce(torch.ones(3 + dist.get_rank()), async_op=True)
        try:
            work.get_future().wait()
        except RuntimeError as error:
            return "all_reduce" in str(error), len(dist.group.WORLD.recorder.pending())

    assert pool(2, backend="shm").run(fn) == [(True, 0)] * 2


def test_a_group_that_does_not_count_is_refused():
    with pytest.raises(RuntimeError, match=r"pdt\.comm\.init"), meter():
        pass


def test_a_failed_call_does_not_stay_pending(pool):
    def fn():
        try:
            dist.all_reduce(torch.ones(2, device="meta"))
        except (RuntimeError, ValueError, NotImplementedError):
            pass
        return [r.label for r in dist.group.WORLD.recorder.pending()]

    assert pool(2).run(fn) == [[], []]


# --- torch's own techniques, unchanged ---


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)]
    return nn.Sequential(*layers)


NUMEL = sum(p.numel() for p in blocks().parameters())
BLOCK_NUMEL = NUMEL // 3


def ddp():
    model = nn.parallel.DistributedDataParallel(blocks())
    return counted(lambda: model(torch.ones(2, 8)).sum().backward())


def zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(blocks())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    model(torch.ones(2, 8)).sum().backward()
    return counted(optimizer.step)


def fsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = blocks(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return counted(lambda: model(torch.ones(2, 8)).sum().backward())


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    block = parallel.parallelize_module(blocks()[0], mesh, plan)
    return counted(lambda: block(torch.ones(2, 8)).sum().backward())


def pipeline():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(blocks()[rank], rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())

    def step():
        if rank == 0:
            schedule.step(torch.ones(8, 8))
        else:
            schedule.step(target=torch.ones(8, 8))

    step()  # the first step also exchanges shapes
    return counted(step)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize(
    ("technique", "expected"),
    [
        (ddp, [{"all_reduce": (1, NUMEL * FLOAT, NUMEL * FLOAT)}] * 2),
        (zero, [{"broadcast": (12, NUMEL * FLOAT, NUMEL * FLOAT / 2)}] * 2),
        (
            fsdp,  # each block is gathered before forward and before backward, but the last stays
            [
                {
                    "all_gather": (6, 6 * BLOCK_NUMEL * FLOAT, 3 * BLOCK_NUMEL * FLOAT),
                    "reduce_scatter": (3, NUMEL * FLOAT, NUMEL * FLOAT / 2),
                }
            ]
            * 2,
        ),
        (tensor_parallel, [{"all_reduce": (1, 2 * 8 * FLOAT, 2 * 8 * FLOAT)}] * 2),
        (
            pipeline,  # 4 micro-batches of (2, 8): activations go up, gradients come down
            [
                {"send": (4, 4 * 16 * FLOAT, 4 * 16 * FLOAT), "recv": (4, 4 * 16 * FLOAT, 0.0)},
                {"recv": (4, 4 * 16 * FLOAT, 0.0), "send": (4, 4 * 16 * FLOAT, 4 * 16 * FLOAT)},
            ],
        ),
    ],
    ids=["DistributedDataParallel", "ZeroRedundancyOptimizer", "FSDP2", "DTensor", "pipelining"],
)
def test_torch_s_own_techniques_are_counted_to_the_byte(pool, backend, technique, expected):
    assert pool(2, backend=backend).run(technique) == expected


def test_a_copy_of_a_model_with_a_metered_group_still_trains(pool):
    def fn():
        model = nn.parallel.DistributedDataParallel(blocks())
        twin = copy.deepcopy(model)
        result = counted(lambda: twin(torch.ones(2, 8)).sum().backward())
        return result["all_reduce"][0], model.module[0][0].weight.grad is None

    try:
        assert pool(2).run(fn) == [(1, True)] * 2
    except RankError as error:
        raise AssertionError(error.text) from error
