"""Layers split over ranks: equal to the whole layer, at the traffic that the paper says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdt.tensor_parallel import ColumnParallelLinear, RowParallelLinear

WORLDS = [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]


class Net(nn.Module):
    """Two layers around a nonlinearity, between two that every rank has whole."""

    def __init__(self, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.before = nn.Linear(5, 6)
        self.first = nn.Linear(6, hidden, bias)
        self.second = nn.Linear(hidden, 4, bias)
        self.after = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.second(torch.tanh(self.first(torch.tanh(self.before(x))))))


def make(hidden: int, bias: bool = True) -> Net:
    torch.manual_seed(hidden)
    return Net(hidden, bias).double()


def split(model: Net) -> Net:
    model.first = ColumnParallelLinear(model.first)  # type: ignore[assignment]
    model.second = RowParallelLinear(model.second)  # type: ignore[assignment]
    return model


def train(model: nn.Module, shape: tuple[int, ...]) -> list[Tensor]:
    """Outputs, gradients of the input, and, after three steps, the parameters by name."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(*shape, 5, dtype=torch.float64, generator=generator, requires_grad=True)
        optimizer.zero_grad()
        out = model(x)
        out.square().sum().backward()
        optimizer.step()
        seen += [out.detach(), x.grad]
    return seen


def _trained(hidden: int, bias: bool, shape: tuple[int, ...]) -> Any:
    model = split(make(hidden, bias))
    seen = train(model, shape)
    layers = [(layer.features, layer.weight.detach()) for layer in (model.first, model.second)]
    whole = [p.detach() for part in (model.before, model.after) for p in part.parameters()]
    return seen, layers, whole, None if model.second.bias is None else model.second.bias.detach()


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("hidden", [8, 7, 4])  # 7 is uneven on every number of ranks but one
@pytest.mark.parametrize(("bias", "shape"), [(True, (3,)), (False, (2, 3)), (True, ())])
def test_equals_the_whole_layers(
    pool: Any, world_size: int, hidden: int, bias: bool, shape: tuple[int, ...]
) -> None:
    model = make(hidden, bias)
    expected = train(model, shape)
    everybody = pool(world_size).run(_trained, hidden, bias, shape)
    for seen, ((rows, first), (columns, second)), whole, second_bias in everybody:
        for ours, theirs in zip(seen, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(first, model.first.weight.detach()[rows])
        torch.testing.assert_close(second, model.second.weight.detach()[:, columns])
        same = [p.detach() for part in (model.before, model.after) for p in part.parameters()]
        torch.testing.assert_close(whole, same)
        if second_bias is not None:
            torch.testing.assert_close(second_bias, model.second.bias.detach())
    covered = [rows for _, ((rows, _), _), _, _ in everybody]
    assert [rows.start for rows in covered[1:]] == [rows.stop for rows in covered[:-1]]
    assert (covered[0].start, covered[-1].stop) == (0, hidden)


def _traffic() -> tuple[list[str], float]:
    from pdt.comm import meter

    model = split(make(8))
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    with meter() as m:
        model(x).sum().backward()
    return [record.op for record in m.records], m.total("all_reduce").wire_nbytes


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_pair_sums_once_forward_and_once_back(pool: Any, world_size: int) -> None:
    tokens, n = 2 * 3, world_size
    for ops, nbytes in pool(world_size).run(_traffic):
        assert ops == ["all_reduce", "all_reduce"]
        assert nbytes == 2 * (n - 1) / n * 8 * tokens * (4 + 6)  # the output's, the input's


def _as_dtensor(hidden: int) -> tuple[list[Tensor], list[Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    theirs = train(parallelize_module(make(hidden), mesh, plan), (2, 3))
    return train(split(make(hidden)), (2, 3)), theirs


def test_equals_torchs_tensor_parallel(pool: Any) -> None:
    for ours, theirs in pool(2).run(_as_dtensor, 8):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def _frozen_and_heads() -> tuple[bool, list[int], bool]:
    linear = nn.Linear(6, 12)
    linear.weight.requires_grad_(False)
    layer = ColumnParallelLinear(linear, multiple_of=4)
    layer(torch.randn(2, 6)).sum().backward()
    start, stop = layer.features.start, layer.features.stop
    has_own_memory = layer.weight.untyped_storage().nbytes() == layer.weight.nbytes
    return layer.weight.grad is None, [start, stop], has_own_memory


def test_heads_stay_whole_and_frozen_weights_frozen(pool: Any) -> None:
    found = pool(2).run(_frozen_and_heads)
    assert found == [(True, [0, 8], True), (True, [8, 12], True)]


def _too_few() -> None:
    ColumnParallelLinear(nn.Linear(6, 8), multiple_of=8)


def test_what_cannot_be_divided_is_refused_with_the_numbers(pool: Any) -> None:
    from pdt.ranks import RankError

    with pytest.raises(RankError, match=r"8 features in multiples of 8 .* among 2 ranks"):
        pool(2).run(_too_few)
