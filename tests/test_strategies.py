"""What each strategy does to the gradients and parameters equals one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdt.strategies import average_gradients, broadcast_parameters


class Cruel(nn.Module):
    """Tied, frozen, unused, used by rank 0 alone, 0-dim, empty, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0))
        self.register_buffer("offset", torch.ones(4))

    def loss(self, rank: int) -> torch.Tensor:
        x = self.embedding(torch.tensor([rank, rank + 1, rank + 3])) * self.frozen + self.offset
        x = x * self.sometimes if rank == 0 else x
        return self.head(x * self.scale).square().mean() + self.empty.sum()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_average_gradients_equals_one_process_on_cruel_parameters(
    pool: Callable[..., Any], world_size: int
) -> None:
    def on_each_rank() -> tuple[dict, dict]:
        model = Cruel().double()
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        model.loss(dist.get_rank()).backward()
        average_gradients(model)
        grads = {name: p.grad for name, p in model.named_parameters()}
        optimizer.step()
        return grads, dict(model.state_dict())

    single = Cruel().double()
    optimizer = torch.optim.AdamW(single.parameters(), weight_decay=0.1)
    (sum(single.loss(rank) for rank in range(world_size)) / world_size).backward()
    grads = {name: p.grad for name, p in single.named_parameters()}
    optimizer.step()
    for rank_grads, state in pool(world_size).run(on_each_rank):
        assert rank_grads["unused"] is None
        assert rank_grads["frozen"] is None
        torch.testing.assert_close(rank_grads, grads, rtol=0, atol=1e-12)
        torch.testing.assert_close(state, dict(single.state_dict()), rtol=0, atol=1e-12)
        assert torch.equal(state["unused"], torch.ones(3).double())


def test_average_gradients_takes_a_gradient_that_is_an_expanded_view(
    pool: Callable[..., Any],
) -> None:
    def on_each_rank() -> torch.Tensor | None:
        layer = nn.Linear(3, 2, bias=False)
        layer.weight.grad = torch.tensor([[1.0 + dist.get_rank()]]).expand(2, 3)
        average_gradients(layer)
        return layer.weight.grad

    for grad in pool(2).run(on_each_rank):
        assert torch.equal(grad, torch.full((2, 3), 1.5))


def test_half_precision_gradients_do_not_overflow_in_the_sum(pool: Callable[..., Any]) -> None:
    def on_each_rank() -> torch.Tensor | None:
        layer = nn.Linear(1, 1, bias=False, dtype=torch.float16)
        layer.weight.grad = torch.full((1, 1), 6e4, dtype=torch.float16)
        average_gradients(layer)
        return layer.weight.grad

    for grad in pool(2).run(on_each_rank):
        assert grad.item() == torch.tensor(6e4, dtype=torch.float16).item()


def test_every_rank_starts_from_the_parameters_and_buffers_of_rank_0(
    pool: Callable[..., Any],
) -> None:
    def on_each_rank() -> dict[str, torch.Tensor]:
        model = Cruel()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor += dist.get_rank()
        return dict(broadcast_parameters(model).state_dict())

    for state in pool(3).run(on_each_rank):
        torch.testing.assert_close(state, dict(Cruel().state_dict()), rtol=0, atol=0)
