"""All-gather and reduce-scatter that are started and waited for: values, order, bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pdt.comm import meter
from pdt.comm.started import start_all_gather, start_reduce_scatter

SIZES = pytest.mark.parametrize(
    "n", [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
BACKENDS = pytest.mark.parametrize("backend", ["gloo", pytest.param("shm", marks=pytest.mark.slow)])


def _own(rank: int, numel: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.arange(numel) * 7 + rank * 5).remainder(23).to(dtype)


@BACKENDS
@SIZES
def test_every_rank_gets_all_shards_and_the_sum_of_its_own(pool: Any, n: int, backend: str) -> None:
    def run(shard_numel: int) -> tuple[Tensor, Tensor]:
        rank = dist.get_rank()
        whole = torch.full((n * shard_numel,), -1.0, dtype=torch.float64)
        whole.chunk(n)[rank].copy_(_own(rank, shard_numel))
        gather = start_all_gather(whole)
        shard = torch.empty(shard_numel, dtype=torch.float64)
        reduce = start_reduce_scatter(shard, _own(rank, n * shard_numel))
        gather.wait()
        reduce.wait()
        return whole, shard

    for shard_numel in (1, 5):
        summed = sum(_own(rank, n * shard_numel) for rank in range(n)).chunk(n)
        gathered = torch.cat([_own(rank, shard_numel) for rank in range(n)])
        for rank, (whole, shard) in enumerate(pool(n, backend=backend).run(run, shard_numel)):
            assert torch.equal(whole, gathered)
            assert torch.equal(shard, summed[rank])


@BACKENDS
def test_nothing_to_move_is_no_call(pool: Any, backend: str) -> None:
    def run() -> int:
        with meter() as m:
            empty = torch.empty(0)
            for started in (start_all_gather(empty), start_reduce_scatter(empty.clone(), empty)):
                started.wait()
        return len(m)

    assert pool(2, backend=backend).run(run) == [0, 0]


def test_one_rank_alone_keeps_what_it_has(pool: Any) -> None:
    def run() -> tuple[Tensor, Tensor, int]:
        whole, shard = torch.ones(3), torch.zeros(3)
        with meter() as m:
            start_all_gather(whole).wait()
            start_reduce_scatter(shard, whole).wait()
        return whole, shard, len(m)

    ((whole, shard, calls),) = pool(1).run(run)
    assert torch.equal(whole, torch.ones(3))
    assert torch.equal(shard, torch.ones(3))
    assert calls == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_summed_in_fp32_and_rounded_once(pool: Any, dtype: torch.dtype) -> None:
    """torch on gloo: bf16 256 + 1 + 1 is 256, fp16 6e4 + 6e4 - 6e4 is infinite."""
    terms = {torch.bfloat16: (256.0, 1.0, 1.0), torch.float16: (6e4, 6e4, -6e4)}[dtype]

    def run() -> float:
        shard = torch.empty(1, dtype=dtype)
        start_reduce_scatter(shard, torch.full((3,), terms[dist.get_rank()], dtype=dtype)).wait()
        return shard.item()

    assert pool(3).run(run) == [torch.tensor(sum(terms), dtype=dtype).item()] * 3


@SIZES
def test_the_sum_runs_in_the_order_of_the_ranks(pool: Any, n: int) -> None:
    def run() -> Tensor:
        shard = torch.empty(4)
        generator = torch.Generator().manual_seed(dist.get_rank())
        start_reduce_scatter(shard, torch.randn(4 * n, generator=generator)).wait()
        return shard

    terms = [torch.randn(4 * n, generator=torch.Generator().manual_seed(r)) for r in range(n)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    for rank, shard in enumerate(pool(n).run(run)):
        assert torch.equal(shard, total.chunk(n)[rank])


@BACKENDS
def test_works_may_be_waited_for_in_any_order_and_again(pool: Any, backend: str) -> None:
    def run() -> list[list[float]]:
        rank = dist.get_rank()
        wholes = [torch.zeros(2) for _ in range(4)]
        shards = [torch.zeros(1) for _ in range(4)]
        works = []
        for i, (whole, shard) in enumerate(zip(wholes, shards, strict=True)):
            whole[rank] = 10 * i + rank
            works.append(start_all_gather(whole))
            works.append(start_reduce_scatter(shard, torch.full((2,), float(i))))
        for i in [5, 0, 3, 7, 1, 2, 6, 4] if rank else range(8):
            works[i].wait()
            works[i].wait()
        return [w.tolist() + s.tolist() for w, s in zip(wholes, shards, strict=True)]

    expected = [[10.0 * i, 10.0 * i + 1, 2.0 * i] for i in range(4)]
    assert pool(2, backend=backend).run(run) == [expected] * 2


@BACKENDS
@SIZES
def test_a_rank_sends_all_but_its_own_part_once(pool: Any, n: int, backend: str) -> None:
    numel = 6 * n

    def run(which: str) -> tuple[float, list[str]]:
        whole, shard = torch.ones(numel), torch.empty(6)
        with meter() as m:
            if which == "gather":
                start_all_gather(whole).wait()
            else:
                start_reduce_scatter(shard, whole).wait()
        return m.total().wire_nbytes, m.ops()

    for which, op in (("gather", "all_gather"), ("reduce", "reduce_scatter")):
        for sent, ops in pool(n, backend=backend).run(run, which):
            assert sent == (n - 1) * 6 * 4
            messages = ["recv", "send"] if backend == "gloo" else [op]
            assert sorted(ops) == (messages if n > 1 else [])


@SIZES
def test_what_arrives_may_wait_in_a_buffer_of_the_caller_s(pool: Any, n: int) -> None:
    def run() -> list[float]:
        shard, inbox = torch.empty(2), torch.empty(2 * (n - 1))
        whole = torch.full((2 * n,), float(dist.get_rank()))
        for _ in range(2):
            start_reduce_scatter(shard, whole, inbox=inbox).wait()
        return shard.tolist()

    assert pool(n).run(run) == [[float(sum(range(n)))] * 2] * n


@pytest.mark.slow
def test_a_group_of_some_ranks_has_its_own_order(pool: Any) -> None:
    def run() -> list[float]:
        group = dist.new_group([0, 2])
        result: list[float] = []
        if dist.get_rank() != 1:
            whole = torch.zeros(2)
            whole[dist.get_rank(group)] = 1.0 + dist.get_rank()
            start_all_gather(whole, group).wait()
            shard = torch.empty(1)
            start_reduce_scatter(shard, whole.clone(), group).wait()
            result = whole.tolist() + shard.tolist()
            dist.destroy_process_group(group)
        return result

    assert pool(3).run(run) == [[1, 3, 2], [], [1, 3, 6]]
