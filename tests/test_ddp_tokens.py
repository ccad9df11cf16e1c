"""Means over all tokens of all ranks: equal to one process, whatever the ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from pdt.comm import meter
from pdt.ddp.tokens import token_mean, token_scale

IGNORED = -100
COUNTS = {  # valid targets by micro-batch, by rank: each has up to 4 ranks
    "one against three": [[1, 0], [3, 3], [2, 1], [0, 4]],
    "a rank without tokens": [[2, 3], [0, 0], [1, 0], [5, 1]],
    "only the first rank has tokens": [[3, 1], [0, 0], [0, 0], [0, 0]],
}


def micro_batch(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Six tokens, of which the first `count` have a target."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(11, (2, 6), generator=generator)
    targets[count:] = IGNORED
    return tokens, targets


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11)).double()


def loss_sum(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1], ignore_index=IGNORED, reduction="sum")


def batches_of(counts: Sequence[int], rank: int) -> list[tuple[Tensor, Tensor]]:
    return [micro_batch(count, 10 * rank + i) for i, count in enumerate(counts)]


def grads(net: nn.Module) -> list[Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def one_process(counts: Sequence[Sequence[int]]) -> tuple[float, list[Tensor]]:
    """The mean loss and its gradients over everything, in one batch."""
    every = [batch for rank, own in enumerate(counts) for batch in batches_of(own, rank)]
    tokens, targets = (torch.cat(part) for part in zip(*every, strict=True))
    net = model()
    loss = F.cross_entropy(net(tokens), targets, ignore_index=IGNORED)
    loss.backward()
    return loss.item(), grads(net)


def in_one_piece(counts: Sequence[Sequence[int]]) -> tuple[float, list[Tensor]]:
    rank = dist.get_rank()
    batch = micro_batch(counts[rank][0], 10 * rank)
    net = DistributedDataParallel(model())
    loss = token_mean(loss_sum(net, batch), (batch[1] != IGNORED).sum())
    loss.backward()
    return loss.item(), grads(net)


def in_micro_batches(counts: Sequence[Sequence[int]]) -> tuple[float, list[Tensor]]:
    rank = dist.get_rank()
    batches = batches_of(counts[rank], rank)
    net = DistributedDataParallel(model())
    scale = token_scale(sum(int((targets != IGNORED).sum()) for _, targets in batches))
    with net.no_sync():
        first = loss_sum(net, batches[0]) * scale
        first.backward()
    second = loss_sum(net, batches[1]) * scale
    second.backward()
    return (first + second).item(), grads(net)


def same(seen: list[tuple[float, list[Tensor]]], expected: tuple[float, list[Tensor]]) -> bool:
    """The mean of the ranks' losses and every rank's gradients are those of one process."""
    mean = sum(loss for loss, _ in seen) / len(seen)
    near = all(
        torch.allclose(grad, wanted, rtol=1e-12, atol=1e-14)
        for _, own in seen
        for grad, wanted in zip(own, expected[1], strict=True)
    )
    return near and abs(mean - expected[0]) < 1e-12


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("counts", list(COUNTS.values()), ids=list(COUNTS))
def test_a_batch_in_one_piece_equals_one_process(pool: Any, world_size: int, counts: Any) -> None:
    seen = pool(world_size).run(in_one_piece, counts)
    assert same(seen, one_process([own[:1] for own in counts[:world_size]]))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("counts", list(COUNTS.values()), ids=list(COUNTS))
def test_micro_batches_equal_one_process(pool: Any, world_size: int, counts: Any) -> None:
    seen = pool(world_size).run(in_micro_batches, counts)
    assert same(seen, one_process(counts[:world_size]))


def scale_and_traffic(counts: Sequence[Any]) -> tuple[float, int, int]:
    with meter() as m:
        scale = token_scale(counts[dist.get_rank()])
    return scale, m.total().calls, m.total().nbytes


def test_the_count_takes_one_all_reduce_of_16_bytes(pool: Any) -> None:
    assert (
        pool(3).run(scale_and_traffic, [2, torch.tensor(4), torch.tensor([6])])
        == [(0.25, 1, 16)] * 3
    )


def test_large_counts_are_exact(pool: Any) -> None:
    (scale, _, _), _ = pool(2).run(scale_and_traffic, [2**53, 1])
    assert scale == 2 / (2**53 + 1)


def error(counts: Sequence[Any]) -> str:
    try:
        token_scale(counts[dist.get_rank()])
    except ValueError as problem:
        return str(problem)
    return "none"


def test_no_tokens_at_all_raises_on_every_rank(pool: Any) -> None:
    said = pool(3).run(error, [0, torch.tensor(0), 0])
    assert all("no rank has a token" in text for text in said)


@pytest.mark.parametrize("wrong", [-1, 2.5, torch.tensor(2.0), torch.tensor([1, 2]), None])
def test_a_wrong_count_on_one_rank_raises_on_every_rank(pool: Any, wrong: Any) -> None:
    said = pool(2).run(error, [3, wrong])
    assert all("whole number of 0 or more on every rank; it is not on 1" in text for text in said)
    assert f"here it is {wrong!r}" in said[1]


def by_group() -> float:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    return token_scale(rank, group=pairs[rank // 2])


def test_only_the_ranks_of_the_group_are_counted(pool: Any) -> None:
    assert pool(4).run(by_group) == [2.0, 2.0, 0.4, 0.4]
