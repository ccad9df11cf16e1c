"""Offloading with sharding, with data parallelism and with scaled losses: equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdt.comm.cost import wire_nbytes
from pdt.offload import Bus, OffloadedGradScaler, OffloadedOptimizer

STEPS, SAMPLES = 4, 12
SETTINGS = {"lr": 0.05, "weight_decay": 0.1}


class OffloadedTorch(OffloadedOptimizer):
    """In float64, with torch's AdamW on the host."""

    def __init__(self, params: Any, **arguments: Any) -> None:
        super().__init__(params, torch.optim.AdamW, **arguments)


class Tower(nn.Module):
    """Blocks with a tied, a frozen and an unused parameter, a transposed and a 0-dim one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.blocks[1].weight.requires_grad_(False)
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        return x @ self.transposed


def make() -> Tower:
    torch.manual_seed(3)
    return Tower().double()


def samples(step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator)


def train(
    model: nn.Module, optimizer: Any, rank: int, n: int, parts: int = 1, clip: Any = None
) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(parts):
            model(samples(step, part)[rank::n]).square().mean().backward()
        if clip:
            clip(0.01)
        optimizer.step()


def _sharded(stage: int, parts: int, clips: bool, delay_after: int | None) -> list[Tensor]:
    from pdt.zero import Zero1, Zero2, fully_shard
    from pdt.zero.zero3 import gathered

    model, rank, n = make(), dist.get_rank(), dist.get_world_size()
    optimizer: Any
    with Bus() as bus:
        if stage == 3:
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            optimizer = OffloadedTorch(
                model.parameters(),
                bus=bus,
                transfer_cap_mb=1e-4,
                delay_after=delay_after,
                **SETTINGS,
            )
            clip = lambda norm: optimizer.clip_grad_norm_(norm, over_ranks=True)  # noqa: E731
        else:
            kind = (Zero1, Zero2)[stage - 1]
            optimizer = kind(
                model.parameters(), OffloadedTorch, bus=bus, bucket_cap_mb=1e-4, **SETTINGS
            )
            clip = optimizer.clip_grad_norm_
        train(model, optimizer, rank, n, parts, clip if clips else None)
        assert bus.nbytes("to host") > 0
        if stage < 3:
            return [p.detach().clone() for p in model.parameters()]
        optimizer.synchronize()
        with gathered(model):
            return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("parts", "clips"), [(1, False), (3, False), (2, True)])
def test_sharded_states_on_the_host_equal_one_process(
    pool: Any, world_size: int, stage: int, parts: int, clips: bool
) -> None:
    model = make()
    plain = torch.optim.AdamW(model.parameters(), **SETTINGS)
    clip = lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm)  # noqa: E731
    train(model, plain, 0, 1, parts, clip if clips else None)
    for found in pool(world_size).run(_sharded, stage, parts, clips, None):
        for ours, theirs in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def _traffic(stage: int) -> list[tuple[int, int]]:
    from pdt.zero import Zero1, Zero2

    model = nn.Linear(16, 16, bias=False, dtype=torch.float64)
    with Bus() as bus:
        optimizer = (Zero1, Zero2)[stage - 1](model.parameters(), OffloadedTorch, bus=bus)
        counted = []
        for _ in range(3):
            optimizer.zero_grad()
            bus.clear()
            model(torch.ones(2, 16, dtype=torch.float64)).sum().backward()
            optimizer.step()
            counted.append((bus.nbytes("to host"), bus.nbytes("to device")))
    return counted


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_carries_its_shard_alone(pool: Any, stage: int) -> None:
    shard = int(wire_nbytes("all_gather", 16 * 16 * 8, 2))  # with two ranks, half of it
    for counted in pool(2).run(_traffic, stage):
        assert counted == [(shard, shard)] * 3


def _ddp(during_backward: bool) -> list[Tensor]:
    from pdt.ddp import DDP

    model = make()
    wrapped = DDP(model, find_unused_parameters=True)
    with Bus() as bus:
        optimizer = OffloadedTorch(
            model.parameters(), bus=bus, during_backward=during_backward, **SETTINGS
        )
        train(wrapped, optimizer, dist.get_rank(), dist.get_world_size())
    return [p.detach().clone() for p in model.parameters()]


def test_gradients_that_ddp_finishes_leave_in_the_step(pool: Any) -> None:
    model = make()
    train(model, torch.optim.AdamW(model.parameters(), **SETTINGS), 0, 1)
    for found in pool(2).run(_ddp, False):
        for ours, theirs in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mine", [True, False])
@pytest.mark.parametrize("transfer_cap_mb", [0.0, 8.0])
def test_gradients_that_leave_before_ddp_has_averaged_them_are_refused(
    pool: Any, mine: bool, transfer_cap_mb: float
) -> None:
    from pdt.ranks import RankError

    with pytest.raises(RankError, match="during_backward=False"):
        pool(2).run(_too_soon, mine, transfer_cap_mb)


def _too_soon(mine: bool, transfer_cap_mb: float) -> None:
    from pdt.ddp import DDP

    model = nn.Linear(4, 4)
    wrapped = (DDP if mine else nn.parallel.DistributedDataParallel)(model)
    with Bus() as bus:
        optimizer = OffloadedOptimizer(
            model.named_parameters(), torch.optim.SGD, bus=bus, transfer_cap_mb=transfer_cap_mb
        )
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def test_scaled_losses_step_alike_and_skip_what_is_not_finite() -> None:
    model, plain = nn.Linear(6, 6), nn.Linear(6, 6)
    plain.load_state_dict(model.state_dict())
    with Bus() as bus:
        mine = OffloadedOptimizer(model.parameters(), bus=bus, transfer_cap_mb=0.0, lr=0.1)
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
        my_scaler = OffloadedGradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(5):
            x = torch.randn(3, 6) * (float("inf") if step == 2 else 1.0)
            for net, optimizer, scale in ((model, mine, my_scaler), (plain, theirs, scaler)):
                optimizer.zero_grad()
                scale.scale(net(x).square().sum()).backward()
                scale.unscale_(optimizer)
                if optimizer is mine:
                    mine.clip_grad_norm_(0.5)
                else:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                scale.step(optimizer)
                scale.update()
            assert my_scaler.get_scale() == scaler.get_scale()
            torch.testing.assert_close(model.weight, plain.weight)
        assert model.weight.isfinite().all()


def _in_forward() -> None:
    from pdt.zero import fully_shard

    model = fully_shard(make())
    OffloadedTorch(model.parameters()).wait_in_forward(model)


def test_sharded_parameters_are_not_waited_for_in_forward(pool: Any) -> None:
    from pdt.ranks import RankError

    with pytest.raises(RankError, match="is sharded: its step cannot be waited for"):
        pool(2).run(_in_forward)


def _dtensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    OffloadedTorch(model.named_parameters())


def test_dtensors_are_refused_by_name(pool: Any) -> None:
    from pdt.ranks import RankError

    with pytest.raises(RankError, match=r"weight is a DTensor .* CPUOffloadPolicy"):
        pool(2).run(_dtensors)
