"""Ranks with uneven numbers of batches train together, and nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pdt.ddp.join import BACKWARD, FORWARD, STOPPED


def _layer() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(2, 2).double()


def _batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 2, dtype=torch.float64, generator=generator)


BATCHES = [3, 1, 0, 2]  # by rank


def _alone(world_size: int, initial: bool) -> list[Tensor]:
    """One process that adds, in each step, the gradients of the ranks that have a batch."""
    module = _layer()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(BATCHES[:world_size])):
        ranks = [rank for rank in range(world_size) if step < BATCHES[rank]]
        optimizer.zero_grad()
        total = sum(module(_batch(step, rank)).square().mean() for rank in ranks)
        (total / (world_size if initial else len(ranks))).backward()
        optimizer.step()
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("find_unused", [True, False])
def test_uneven_batches_equal_one_process(
    pool: Any, world_size: int, initial: bool, find_unused: bool
) -> None:
    """Afterwards all ranks hold what the rank that trained longest holds."""

    def run() -> list[Tensor]:
        from pdt.ddp import DDP

        model = DDP(
            _layer(), bucket_cap_mb=0, first_bucket_mb=0, find_unused_parameters=find_unused
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        rank = dist.get_rank()
        with model.join(divide_by_initial_world_size=initial):
            for step in range(BATCHES[rank]):
                optimizer.zero_grad()
                model(_batch(step, rank)).square().mean().backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    for params in pool(world_size).run(run):
        for got, wanted in zip(params, _alone(world_size, initial), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_accumulation_and_two_forwards_are_followed(pool: Any) -> None:
    def run() -> list[Tensor]:
        from pdt.ddp import DDP

        model, rank = DDP(_layer()), dist.get_rank()
        with model.join():
            for step in range(3 - 2 * rank):
                model.zero_grad()
                with model.no_sync():
                    model(_batch(step, rank)).mean().backward()
                loss = model(_batch(step + 7, rank)).mean() + model(_batch(step + 8, rank)).mean()
                loss.backward()
                last = [p.grad.clone() for p in model.parameters()]
        return last

    module = _layer()
    for step in (2, 9, 10):
        (module(_batch(step, 0)).mean() / 2).backward()
    for got, param in zip(pool(2).run(run)[0], module.parameters(), strict=True):
        torch.testing.assert_close(got, param.grad, rtol=0, atol=1e-12)


def test_a_rank_that_had_no_batch_learns_by_its_own_first_backward(pool: Any) -> None:
    """A layer that a re-entrant checkpoint runs twice: rank 1 only shadowed when others learned."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = _layer(), _layer()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return self.head(x)

    def run() -> list[Tensor]:
        from pdt.ddp import DDP

        model, rank = DDP(Twice(), bucket_cap_mb=0, first_bucket_mb=0), dist.get_rank()
        with model.join():
            for step in range(1 - rank):
                model(_batch(step, rank).requires_grad_()).mean().backward()
        for step in range(2):
            model.zero_grad()
            model(_batch(step, rank).requires_grad_()).mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    alone = Twice()
    (sum(alone(_batch(1, rank).requires_grad_()).mean() for rank in range(2)) / 2).backward()
    for grads in pool(2).run(run):
        for got, param in zip(grads, alone.parameters(), strict=True):
            torch.testing.assert_close(got, param.grad, rtol=0, atol=1e-12)


def test_buffers_come_from_a_rank_that_still_has_batches(pool: Any) -> None:
    """Rank 0 stops first: in the end its running mean is that of rank 1."""

    def run() -> tuple[float, float]:
        from pdt.ddp import DDP

        model = DDP(nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 1)))
        rank = dist.get_rank()
        with model.join():
            for _ in range(1 + 20 * rank):
                model(torch.randn(4, 1) * 0.01 + 5 * rank).sum().backward()
        return model.module[0].running_mean.item(), len(model.module[0].state_dict())

    first, second = pool(2).run(run)
    assert first == second
    assert first[0] == pytest.approx(5 * (1 - 0.9**20), abs=0.1)


def test_an_early_end_can_be_an_error_on_every_rank(pool: Any) -> None:
    def run() -> str:
        from pdt.ddp import DDP

        model, rank = DDP(_layer()), dist.get_rank()
        try:
            with model.join(throw_on_early_termination=True):
                for step in range(3 - rank):
                    model(_batch(step, rank)).mean().backward()
        except RuntimeError as error:
            model.zero_grad()
            model(_batch(0, rank)).mean().backward()  # join is over, training goes on
            return str(error)
        return "no error"

    first, second = pool(2).run(run)
    assert first == second
    assert "ranks [1] have no batches left while ranks [0] go on" in first


def test_a_rank_goes_forward_while_another_goes_backward(pool: Any) -> None:
    def run() -> str:
        from pdt.ddp.join import Join

        join = Join(
            None,
            torch.device("cpu"),
            lambda scale: None,
            divide_by_initial_world_size=True,
            throw_on_early_termination=False,
        )
        try:
            join.tell(FORWARD if dist.get_rank() == 0 else BACKWARD)
        except RuntimeError as error:
            return f"{error} {join.tell(STOPPED)}"
        return "no error"

    first, second = pool(2).run(run)
    assert first == second
    assert "must make the same steps, but they are at [1, 2]" in first


def test_outside_join_nothing_is_told(pool: Any) -> None:
    def run() -> list[str]:
        from pdt.comm import meter
        from pdt.ddp import DDP

        model = DDP(_layer())
        with model.join():
            model(_batch(0, 0)).mean().backward()
        with meter() as m:
            model(_batch(0, 0)).mean().backward()
        return m.ops()

    assert pool(2).run(run) == [["all_reduce"]] * 2
