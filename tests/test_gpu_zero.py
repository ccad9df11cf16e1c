"""ZeRO on a GPU: equal to one process, as small as the formulas say by CUDA's own allocator."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdt import Ranks
from pdt.ranks import device

pytestmark = pytest.mark.gpu

UNITS, WIDTH, STEPS = 8, 1024, 3
PLACES = [(1, "nccl"), (2, "gloo")]  # with gloo the ranks share one GPU


def build(place: torch.device, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(UNITS)]
    return nn.Sequential(*layers).to(place)


def shard(model: nn.Module, stage: int) -> torch.optim.Optimizer:
    from pdt.zero import Zero1, Zero2, fully_shard

    if stage < 3:
        return (Zero1, Zero2)[stage - 1](model.parameters(), torch.optim.AdamW, lr=1e-3)
    for unit in model.children():
        fully_shard(unit)
    fully_shard(model)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def losses(stage: int, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all samples, after each step: sharded, and by one process."""
    place = device(share_gpu=backend == "gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).double().to(place)
    single = build(place, 64).double()
    model = copy.deepcopy(single)
    optimizer, reference = shard(model, stage), torch.optim.AdamW(single.parameters(), lr=1e-3)
    expected = torch.stack([step(single, reference, x) for _ in range(STEPS)])
    found = torch.stack([step(model, optimizer, x[rank::n]) for _ in range(STEPS)])
    dist.all_reduce(found)
    return found / n, expected


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("world_size", "backend"), PLACES)
def test_each_stage_equals_one_process_on_a_gpu(stage: int, world_size: int, backend: str) -> None:
    with Ranks(world_size, backend=backend) as ranks:
        for found, expected in ranks.run(losses, stage, backend):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def held_nbytes(stage: int, backend: str) -> tuple[int, int]:
    """By the allocator after a step without gradients: what is held, and the parameters alone."""
    place = device(share_gpu=backend == "gloo")
    x = torch.randn(4, WIDTH, device=place)
    before = torch.cuda.memory_allocated(place)
    model = build(place)
    nbytes = sum(p.nbytes for p in model.parameters())
    optimizer = shard(model, stage)
    for _ in range(2):
        step(model, optimizer, x)
    optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(place) - before, nbytes


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("world_size", "backend"), PLACES)
def test_a_rank_holds_what_the_formula_says_on_a_gpu(
    stage: int, world_size: int, backend: str
) -> None:
    with Ranks(world_size, backend=backend) as ranks:
        for held, nbytes in ranks.run(held_nbytes, stage, backend):
            parameters = nbytes / (world_size if stage == 3 else 1)
            assert held == pytest.approx(parameters + 2 * nbytes / world_size, rel=0.05)


def test_stage_3_waits_for_the_gpu_once_in_forward_and_backward() -> None:
    """For what the ranks agree on at the end of a backward."""

    def fn() -> Any:
        place = device()
        model = build(place, 64)
        optimizer, x = shard(model, 3), torch.randn(8, 64, device=place)
        for _ in range(2):  # the first step compares the order of the units
            step(model, optimizer, x)
        optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                model(x).square().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return len([w for w in told if "synchroniz" in str(w.message)])

    with Ranks(1, backend="nccl") as ranks:
        assert ranks.run(fn)[0] <= 1
