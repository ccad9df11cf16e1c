"""A pipeline equals one process, whatever its schedule, and sends and keeps what it promises."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pdt.comm import meter
from pdt.pipeline_parallel import Pipeline
from pdt.pipeline_parallel.layout import HEADER_NBYTES
from pdt.pipeline_parallel.order import in_flight
from tests._pipeline_cases import (
    DIM,
    SCHEDULES,
    batch,
    build,
    in_turn,
    make,
    train,
    train_alone,
)


@pytest.mark.parametrize("model", ["plain", "cruel", "frozen"])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_one_process(pool: Any, world_size: int, name: str, model: str) -> None:
    m = world_size * 2
    schedule = SCHEDULES[name](world_size, m)
    size, steps = 2 * m + 1, 3  # the last micro-batches are smaller
    losses, params = train_alone(model, schedule.num_stages, size, steps)
    found = pool(world_size).run(train, model, schedule, size, steps)
    assert found[-1][0] == pytest.approx(losses, rel=1e-12)
    assert all(loss is None for own, _ in found[:-1] for loss in own)
    by_stage = {stage: held for _, own in found for stage, held in own.items()}
    ours = [param for stage in sorted(by_stage) for param in by_stage[stage]]
    for mine, theirs in zip(ours, params, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


# What it sends and keeps


def _sent(name: str) -> tuple[int, int, int]:
    schedule = SCHEDULES[name](dist.get_world_size(), 4)
    pipeline = build("plain", schedule)
    inputs, target = batch("plain", 8)
    pipeline.step(*inputs, target=target)
    with meter() as first:
        pipeline.step(*inputs, target=target)
    other, more = batch("plain", 4)
    with meter() as changed:
        pipeline.step(*other, target=more)
    sends = first.total("send")
    return sends.calls, sends.nbytes, changed.total("send").nbytes


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_boundary_carries_an_activation_and_a_gradient_per_micro_batch(
    pool: Any, name: str
) -> None:
    m, sample_nbytes = 4, 3 * DIM * 8
    boundaries = SCHEDULES[name](2, m).num_stages - 1
    found = pool(2).run(_sent, name)
    assert sum(calls for calls, _, _ in found) == 2 * m * boundaries
    assert sum(nbytes for _, nbytes, _ in found) == 2 * 8 * sample_nbytes * boundaries
    headers = HEADER_NBYTES * boundaries  # once for the new shape
    assert sum(nbytes for *_, nbytes in found) == 2 * 4 * sample_nbytes * boundaries + headers


class _Saves(nn.Module):
    """Saves its input, and counts how many of these live."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM).double()
        self.alive = self.most = 0

    def _let_go(self) -> None:
        self.alive -= 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        keeps = y.clone()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept[0]):
            return keeps.sin()

    def _pack(self, tensor: Tensor) -> list[Any]:
        kept = _List([tensor])
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(kept, self._let_go)
        return kept


class _List(list):
    """A list to which there are weak references."""


def _kept(name: str) -> tuple[int, int]:
    schedule = SCHEDULES[name](dist.get_world_size(), 6)
    chunks = [_Saves() for _ in range(schedule.num_chunks)]
    pipeline = Pipeline(chunks, schedule, mse_loss)
    inputs, target = batch("plain", 6)
    pipeline.step(*inputs, target=target)
    assert [chunk.alive for chunk in chunks] == [0] * len(chunks)
    return pipeline.peak_in_flight, max(chunk.most for chunk in chunks)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_keeps_as_many_activations_as_the_schedule_says(
    pool: Any, world_size: int, name: str
) -> None:
    schedule = SCHEDULES[name](world_size, 6)
    found = pool(world_size).run(_kept, name)
    assert [peak for peak, _ in found] == in_flight(schedule)
    if schedule.num_chunks == 1:
        assert [most for _, most in found] == in_flight(schedule)


# Steps


def _accumulated(name: str) -> list[float]:
    pipeline = build("plain", SCHEDULES[name](dist.get_world_size(), 4))
    inputs, target = batch("plain", 9)
    params = [p for chunk in pipeline.chunks for p in chunk.parameters()]
    pipeline.step(*inputs, target=target)
    once = [p.grad.clone() for p in params if p.grad is not None]
    for _ in range(2):
        pipeline.step(*inputs, target=target)
    return [
        ((p.grad - 3 * one).norm() / one.norm().clamp(min=1e-30)).item()
        for p, one in zip(params, once, strict=True)
        if p.grad is not None
    ]


@pytest.mark.parametrize("name", ["1f1b", "zb_h2"])
def test_gradients_of_several_steps_add_up(pool: Any, name: str) -> None:
    assert max(max(own) for own in pool(2).run(_accumulated, name)) < 1e-12


def _tied() -> Any:
    from pdt.pipeline_parallel import sum_tied_gradients

    schedule, rank = SCHEDULES["1f1b"](2, 3), dist.get_rank()
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(DIM, DIM, dtype=torch.float64))
    stage = nn.Linear(DIM, DIM, bias=False).double()
    stage.weight = weight
    pipeline = Pipeline(stage, schedule, mse_loss)
    (x,), target = batch("plain", 5)
    pipeline.step(x, target=target)
    sum_tied_gradients([weight])
    alone = weight.detach().clone().requires_grad_()
    mse_loss(x @ alone.t() @ alone.t(), target).backward()
    torch.testing.assert_close(weight.grad, alone.grad, rtol=0, atol=1e-12)
    return rank


def test_a_tied_weight_has_the_sum_of_both_gradients(pool: Any) -> None:
    assert pool(2).run(_tied) == [0, 1]


def _evaluated(model: str) -> Any:
    pipeline = build(model, SCHEDULES["zb_h1"](dist.get_world_size(), 3), keep_outputs=True)
    inputs, target = batch(model, 7)
    loss = pipeline.evaluate(*inputs, target=target)
    outputs = pipeline.outputs
    assert pipeline.evaluate(*inputs) is None
    trained = pipeline.step(*inputs, target=target)
    if pipeline.is_last:
        torch.testing.assert_close(pipeline.outputs, outputs, rtol=0, atol=1e-12)
        assert loss is not None
        assert trained is not None
        assert loss.item() == trained.item()
        assert not pipeline.outputs.requires_grad  # type: ignore[union-attr]
    return outputs


@pytest.mark.parametrize("model", ["plain", "cruel"])
def test_evaluation_runs_the_forwards_alone(pool: Any, model: str) -> None:
    inputs, _ = batch(model, 7)
    with torch.no_grad():
        expected = in_turn(make(model, 2), inputs)
    first, last = pool(2).run(_evaluated, model)
    assert first is None
    torch.testing.assert_close(last, expected, rtol=0, atol=1e-12)


def _spans() -> list[tuple[str, str]]:
    pipeline = build("plain", SCHEDULES["zb_h1"](2, 2))
    inputs, target = batch("plain", 4)
    pipeline.step(*inputs, target=target)
    return [(span.name, span.kind) for span in pipeline.timeline.spans]


def test_each_action_has_a_span(pool: Any) -> None:
    schedule = SCHEDULES["zb_h1"](2, 2)
    names = [[str(action) for action in own] for own in schedule.actions]
    found = pool(2).run(_spans)
    assert [[name for name, _ in own] for own in found] == names
    assert {kind for own in found for _, kind in own} == {"forward", "backward", "weights"}


# What goes wrong


def _too_few() -> str:
    pipeline = build("plain", SCHEDULES["gpipe"](2, 4))
    inputs, target = batch("plain", 3)
    with pytest.raises(ValueError, match="3 samples cannot be cut into num_microbatches=4"):
        pipeline.step(*inputs, target=target)
    with pytest.raises(ValueError, match=r"ranks \[1\] have another schedule"):
        build("plain", SCHEDULES["gpipe"](2, 4 + dist.get_rank()))
    with pytest.raises(ValueError, match="for 3 ranks with 1 chunks, the group has 2 ranks"):
        Pipeline(nn.Identity(), SCHEDULES["gpipe"](3, 4), mse_loss)
    return "refused"


def test_what_does_not_fit_is_refused_on_every_rank(pool: Any) -> None:
    assert pool(2).run(_too_few) == ["refused"] * 2


class _Moody(nn.Module):
    def __init__(self, mood: str) -> None:
        super().__init__()
        self.mood, self.calls, self.linear = mood, 0, nn.Linear(DIM, DIM).double()

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.calls == 3:
            if self.mood == "raise":
                raise ArithmeticError("no more")
            return x[:, :1] if self.mood == "shrink" else [x]
        return self.linear(x)


def _moody(mood: str) -> None:
    schedule = SCHEDULES["1f1b"](2, 4)
    stage = _Moody(mood if dist.get_rank() == 0 else "steady")
    (x,), target = batch("plain", 8)
    Pipeline(stage, schedule, mse_loss).step(x, target=target)


@pytest.mark.parametrize(
    ("mood", "message"),
    [
        ("raise", "ArithmeticError: no more"),
        ("shrink", r"stage 0 returned float64 \(2, 1, 4\).* for micro-batch 2"),
        ("list", "TypeError: a stage must return a tensor"),
    ],
)
def test_a_stage_that_fails_ends_all_and_says_where(mood: str, message: str) -> None:
    from pdt import Ranks
    from pdt.ranks.errors import RankError

    start_s = time.perf_counter()
    with Ranks(2, timeout_s=60) as ranks, pytest.raises(RankError, match=message) as caught:
        ranks.run(_moody, mood)
    assert time.perf_counter() - start_s < 50  # not by the time limit
    assert "In F of micro-batch 2 in stage 0, on rank 0" in str(caught.value)
