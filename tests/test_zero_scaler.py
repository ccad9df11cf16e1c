"""ShardedGradScaler: one decision and one scale on all ranks, whatever each of them holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

SIZES = pytest.mark.parametrize("world_size", [1, 2, 4])
STAGES = pytest.mark.parametrize("stage", [0, 1, 2])


def _make(stage: int, row: nn.Parameter, rank: int, **settings: Any) -> tuple[Any, Any]:
    """The optimizer, and for stage 0, where `.grad` are shards, how gradients come into them."""
    from pdt.zero import Zero1, Zero2

    if stage:
        return (Zero1, Zero2)[stage - 1]([row], torch.optim.SGD, **settings), lambda: None
    shard = nn.Parameter(row.detach().flatten().tensor_split(dist.get_world_size())[rank].clone())

    def reduce() -> None:
        grad = torch.zeros_like(row) if row.grad is None else row.grad
        dist.all_reduce(grad)
        mine = (grad / dist.get_world_size()).flatten().tensor_split(dist.get_world_size())[rank]
        shard.grad = None if shard.numel() == 0 else mine.to(shard.dtype)  # empty: no gradient
        row.grad = None

    settings.pop("master_dtype", None)
    return torch.optim.SGD([shard], **settings), reduce


@STAGES
@SIZES
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_on_one_rank_is_skipped_on_all(
    pool: Any, world_size: int, stage: int, bad: float
) -> None:
    """A parameter of one row: most ranks hold nothing of it. torch's scaler raises there, or some
    ranks step and others do not."""

    def run() -> list[tuple[float, list[float]]]:
        from pdt.zero.scaler import ShardedGradScaler

        rank, n = dist.get_rank(), dist.get_world_size()
        row = nn.Parameter(torch.ones(1, 1))
        optimizer, reduce = _make(stage, row, rank, lr=0.25)
        scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_interval=2)
        held = row if stage else optimizer.param_groups[0]["params"][0]
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            factor = bad if step == 1 and rank == n - 1 else 1.0
            scaler.scale((row * factor).sum()).backward()
            reduce()
            scaler.step(optimizer)
            scaler.update()
            seen.append((scaler.get_scale(), held.detach().flatten().tolist()))
        return seen

    for rank, seen in enumerate(pool(world_size).run(run)):
        assert [scale for scale, _ in seen] == [4.0, 2.0, 2.0, 4.0, 4.0]
        if stage or rank == 0:
            assert [value for _, value in seen] == [[0.75], [0.75], [0.5], [0.25], [0.0]]


@SIZES
def test_stage_3_skips_on_all_ranks_what_is_not_finite_on_one(pool: Any, world_size: int) -> None:
    def run() -> list[tuple[float, list[float]]]:
        from pdt.zero import fully_shard
        from pdt.zero.scaler import ShardedGradScaler
        from pdt.zero.zero3 import gathered

        rank, n = dist.get_rank(), dist.get_world_size()
        model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(model.weight)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_interval=2)
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            factor = float("inf") if step == 1 and rank == n - 1 else 1.0
            scaler.scale(model(torch.full((3,), factor)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            with gathered(model):
                seen.append((scaler.get_scale(), model.weight.flatten().tolist()))
        return seen

    for seen in pool(world_size).run(run):
        assert [scale for scale, _ in seen] == [4.0, 2.0, 2.0, 4.0, 4.0]
        assert [value for _, value in seen] == [[x] * 3 for x in (0.75, 0.75, 0.5, 0.25, 0.0)]


@pytest.mark.parametrize("stage", [1, 2])
@SIZES
def test_fp16_is_unscaled_in_the_master_s_dtype_and_clipped(
    pool: Any, world_size: int, stage: int
) -> None:
    """Gradients of 2**-20 are nothing in fp16 unless they are scaled, and unscaled in fp32."""
    tiny = 2.0**-26

    def run() -> list[float]:
        from pdt.zero.scaler import ShardedGradScaler

        row = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        optimizer, _ = _make(stage, row, dist.get_rank(), lr=2.0**20, master_dtype=torch.float32)
        scaler = ShardedGradScaler("cpu", init_scale=2.0**14)
        scaler.scale((row.float() * tiny).sum()).backward()
        scaler.unscale_(optimizer)
        norm = optimizer.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        return [norm.item(), *row.tolist()]

    for norm, *values in pool(world_size).run(run):
        assert norm == pytest.approx(tiny * 3**0.5)
        assert values == [-(2.0**-6)] * 3


def test_the_same_as_torch_s_in_one_process(pool: Any) -> None:
    def train(scaler: Any, make: Any, part: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = make(model.parameters(), torch.optim.AdamW, lr=0.1)
        seen = []
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            loss = model(part(x)).square().mean() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen += [
                torch.tensor(scaler.get_scale()),
                *(p.detach().clone() for p in model.parameters()),
            ]
        return seen

    def run(stage: int) -> list[Tensor]:
        from pdt.zero import Zero1, Zero2
        from pdt.zero.scaler import ShardedGradScaler

        scaler = ShardedGradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        return train(scaler, (Zero1, Zero2)[stage - 1], lambda x: x[dist.get_rank() :: 2])

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    expected = train(scaler, lambda params, cls, **kw: cls(params, **kw), lambda x: x)
    for stage in (1, 2):
        for found in pool(2).run(run, stage):
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_fp16_without_a_master_copy_is_refused_and_disabled_does_nothing(pool: Any) -> None:
    def run() -> tuple[str, float]:
        from pdt.zero.scaler import ShardedGradScaler

        row = nn.Parameter(torch.ones(2, dtype=torch.float16))
        optimizer, _ = _make(1, row, dist.get_rank(), lr=0.5)
        said = ""
        for enabled in (True, False):
            optimizer.zero_grad()
            scaler = ShardedGradScaler("cpu", init_scale=2.0, enabled=enabled)
            scaler.scale(row.sum()).backward()
            try:
                scaler.step(optimizer)
                scaler.update()
            except ValueError as error:
                said = str(error)
        return said, row.sum().item()

    for said, total in pool(2).run(run):
        assert "pass master_dtype to Zero1" in said
        assert total == 1.0
