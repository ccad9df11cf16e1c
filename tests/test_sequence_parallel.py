"""Norms and residuals on a part of the sequence: equal to one process, with as many bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdt.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_sequence,
    own_part,
    sum_partial_grads,
)

WORLDS = [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
B, T, D = 2, 12, 6


class Layer(nn.Module):
    """A residual around a norm and two linear layers; the sequence is in `dim`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.sharded = dim, False
        self.norm = nn.LayerNorm(D)
        self.first, self.second = nn.Linear(D, 8), nn.Linear(8, D)
        self.last = nn.LayerNorm(D)

    def split(self, sharded: bool) -> None:
        self.sharded, dim = sharded, self.dim if sharded else None
        self.first = ColumnParallelLinear(self.first, sequence_dim=dim)  # type: ignore[assignment]
        self.second = RowParallelLinear(self.second, sequence_dim=dim)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        if self.sharded:
            x = own_part(x, self.dim)
        y = self.last(x + self.second(torch.tanh(self.first(self.norm(x)))))
        return gather_sequence(y, self.dim) if self.sharded else y


def make(dim: int) -> Layer:
    torch.manual_seed(dim)
    return Layer(dim).double()


def sample(dim: int) -> Tensor:
    shape = (B, T, D) if dim == 1 else (T, B, D)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _passed(dim: int) -> Any:
    layer = make(dim)
    layer.split(sharded=True)
    out = layer(sample(dim))
    # what is gathered in the end goes to all ranks, so each has all of the loss: a t-th counts
    (out.square().sum() / dist.get_world_size()).backward()
    partial = [*layer.norm.parameters(), *layer.last.parameters(), layer.second.bias]
    sum_partial_grads(partial)
    features = layer.first.features
    grads = [p.grad for p in (*partial, layer.first.weight, layer.first.bias, layer.second.weight)]
    return out.detach(), grads, features


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dim", [0, 1])
def test_equals_the_whole_layer(pool: Any, world_size: int, dim: int) -> None:
    layer = make(dim)
    out = layer(sample(dim))
    out.square().sum().backward()
    whole = [*layer.norm.parameters(), *layer.last.parameters(), layer.second.bias]
    for found, grads, own in pool(world_size).run(_passed, dim):
        torch.testing.assert_close(found, out.detach(), rtol=1e-10, atol=1e-12)
        *replicated, first, bias, second = grads
        for ours, param in zip(replicated, whole, strict=True):
            torch.testing.assert_close(ours, param.grad, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(first, layer.first.weight.grad[own], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(bias, layer.first.bias.grad[own], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(second, layer.second.weight.grad[:, own], rtol=1e-9, atol=1e-11)


def _sent(sharded: bool) -> float:
    from pdt.comm import meter

    layer = make(1)
    layer.split(sharded)
    x = sample(1).requires_grad_()
    if sharded:
        x = own_part(x.detach()).clone().requires_grad_()
    with meter() as m:
        layer.second(torch.tanh(layer.first(layer.norm(x)))).sum().backward()
    return sum(record.wire_nbytes for record in m.records)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_sends_as_much_and_gathers_the_input_once_more(pool: Any, world_size: int) -> None:
    whole = 2 * 2 * (world_size - 1) / world_size * 8 * B * T * D  # two all-reduces
    assert pool(world_size).run(_sent, False) == [whole] * world_size
    again = (world_size - 1) / world_size * 8 * B * T * D  # so that the graph keeps a part alone
    assert pool(world_size).run(_sent, True) == [whole + again] * world_size


def _kept(sharded: bool) -> int:
    from pdt.measure import SavedActivations

    layer = make(1)
    layer.split(sharded)
    x = own_part(sample(1)).clone() if sharded else sample(1)
    with SavedActivations(layer) as saved:
        out = layer.first(x.requires_grad_())
        nbytes = saved.nbytes
    del out
    return nbytes


def test_the_graph_keeps_a_part_of_the_input(pool: Any) -> None:
    assert pool(2).run(_kept, False) == [8 * B * T * D] * 2
    assert pool(2).run(_kept, True) == [8 * B * T * D // 2] * 2


def _uneven() -> None:
    own_part(torch.ones(2, 5, 3))


def test_a_sequence_that_cannot_be_divided_is_refused(pool: Any) -> None:
    from pdt.ranks import RankError

    with pytest.raises(RankError, match=r"dim 1 of \(2, 5, 3\) is 5 long, no multiple of 2 ranks"):
        pool(2).run(_uneven)
