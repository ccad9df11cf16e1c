"""Pipelines beside other techniques and beside torch's, split backwards, and measured bubbles."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pdt.pipeline_parallel import Pipeline, average_gradients
from pdt.pipeline_parallel.backward import input_grads, whole_backward
from pdt.pipeline_parallel.simulate import Times, simulate
from tests._pipeline_cases import DIM, SCHEDULES, batch, make, own, train_alone

# A backward in two parts


class _Counted(torch.autograd.Function):
    """The identity; counts its backwards."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _Counted.calls += 1
        return grad


def _stage(tied: bool) -> tuple[list[Tensor], Tensor, list[nn.Parameter]]:
    torch.manual_seed(0)
    first, last = (nn.Linear(DIM, DIM).double() for _ in range(2))
    if tied:
        last.weight = first.weight
    alone = nn.Parameter(torch.randn(3, DIM, dtype=torch.float64))
    x = torch.randn(3, DIM, dtype=torch.float64, requires_grad=True)
    y = last(_Counted.apply(torch.tanh(first(x)))) + alone.exp()
    params = list(dict.fromkeys([*first.parameters(), *last.parameters(), alone]))
    return [y, alone.sin()], x, params


@pytest.mark.parametrize("tied", [False, True])
def test_two_parts_make_the_gradients_of_one(tied: bool) -> None:
    outputs, x, params = _stage(tied)
    grads: list[Tensor | None] = [torch.randn_like(y) for y in outputs]
    whole_backward(outputs, grads)
    expected = [p.grad for p in [x, *params]]
    outputs, x, params = _stage(tied)
    (found,), weights = input_grads(outputs, grads, [x])
    assert all(p.grad is None for p in params)
    weights()
    for mine, theirs in zip([found, *(p.grad for p in params)], expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


def test_the_second_part_does_not_go_along_the_path_again() -> None:
    outputs, x, _ = _stage(tied=False)
    _Counted.calls = 0
    _, weights = input_grads(outputs, [None, None], [x])
    assert _Counted.calls == 1
    weights()
    assert _Counted.calls == 1


def test_hooks_on_weights_see_all_gradients_in_one_backward() -> None:
    outputs, x, params = _stage(tied=False)
    tasks: list[int] = []
    for param in params:
        param.register_post_accumulate_grad_hook(
            lambda _: tasks.append(torch._C._current_graph_task_id())
        )
    input_grads(outputs, [None, None], [x])[1]()
    assert len(tasks) == len(params)
    assert len(set(tasks)) == 1


def test_a_tensor_hook_on_a_weight_runs_once() -> None:
    outputs, x, params = _stage(tied=False)
    calls: list[int] = []
    params[0].register_hook(lambda _: calls.append(1))
    input_grads(outputs, [None, None], [x])[1]()
    assert calls == [1]


def test_a_stage_without_weights_or_without_inputs_splits() -> None:
    x = torch.randn(3, requires_grad=True)
    (found,), weights = input_grads([x.square()], [torch.ones(3)], [x])
    weights()
    torch.testing.assert_close(found, 2 * x.detach())
    weight = torch.ones(3, requires_grad=True)
    _, weights = input_grads([weight.square()], [torch.ones(3)], [])
    assert weight.grad is None
    weights()
    torch.testing.assert_close(weight.grad, torch.full((3,), 2.0))


# With data parallelism


def _replicated(name: str, way: str, size: int, steps: int) -> list[Tensor]:
    """Ranks 0, 1 and 2, 3 are pipelines; 0, 2 and 1, 3 hold the same stage."""
    from pdt.ddp import DDP
    from pdt.zero import Zero1

    rank, schedule = dist.get_rank(), SCHEDULES[name](2, 4)
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    chunks = own(make("plain", schedule.num_stages), schedule, rank % 2)
    params = [p for chunk in chunks for p in chunk.parameters()]
    wrapped = [DDP(chunk, group=dp) for chunk in chunks] if way == "ddp" else chunks
    pipeline = Pipeline(wrapped, schedule, mse_loss, group=pp)
    settings = {"lr": 0.1, "momentum": 0.9}
    optimizer: torch.optim.Optimizer = (
        Zero1(params, torch.optim.SGD, group=dp, **settings)
        if way == "zero1"
        else torch.optim.SGD(params, **settings)
    )
    for step in range(steps):
        (x,), target = batch("plain", size, step)
        optimizer.zero_grad()
        pipeline.step(x[rank // 2 :: 2], target=target[rank // 2 :: 2])
        if way == "average":
            average_gradients(params, dp)
        optimizer.step()
    return [p.detach().clone() for p in params]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["average", "ddp", "zero1"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h2"])
def test_replicas_of_a_pipeline_equal_one_process(pool: Any, name: str, way: str) -> None:
    size, steps = 16, 3
    if way == "ddp" and name == "zb_h2":
        with pytest.raises(RuntimeError, match="call average_gradients after the step"):
            pool(4).run(_replicated, name, way, size, steps)
        return
    found = pool(4).run(_replicated, name, way, size, steps)
    _, expected = train_alone("plain", 2, size, steps)
    for pipeline in (found[:2], found[2:]):
        ours = [param for rank in pipeline for param in rank]
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


# Beside torch


def _both(name: str, m: int) -> list[tuple[Tensor, Tensor]]:
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    rank, p = dist.get_rank(), dist.get_world_size()
    schedule = SCHEDULES[name](p, m)
    (x,), target = batch("plain", 4 * m)
    ours = own(make("plain", schedule.num_stages), schedule, rank)
    Pipeline(ours, schedule, mse_loss).step(x, target=target)
    theirs = own(make("plain", schedule.num_stages), schedule, rank)
    stages = [
        pipelining.PipelineStage(
            chunk, schedule.stage(rank, c), schedule.num_stages, torch.device("cpu")
        )
        for c, chunk in enumerate(theirs)
    ]
    cls = {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zb_h1": schedules.ScheduleInterleavedZeroBubble,
    }[name]
    multi = name in ("interleaved", "zb_h1")
    torchs: Any = cls(stages if multi else stages[0], m, loss_fn=mse_loss)
    inputs = (x,) if rank == 0 else ()
    torchs.step(*inputs, **({"target": target} if rank == p - 1 else {}))
    pairs = zip(nn.ModuleList(ours).parameters(), nn.ModuleList(theirs).parameters(), strict=True)
    return [(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1"])
def test_gradients_are_those_of_torch(pool: Any, name: str) -> None:
    for pairs in pool(2).run(_both, name, 4):
        assert pairs
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


# Time


class _Sleeps(torch.autograd.Function):
    """The identity, whose forward and backward take their times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


class _Slow(nn.Module):
    """x * w: forward, gradient of x and gradient of w take one unit each."""

    def __init__(self, unit_s: float) -> None:
        super().__init__()
        self.unit_s, self.w = unit_s, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        slow_x = _Sleeps.apply(x, self.unit_s, self.unit_s)
        return slow_x * _Sleeps.apply(self.w, 0.0, self.unit_s)


def _bubble(name: str, m: int, unit_s: float) -> float:
    schedule = SCHEDULES[name](dist.get_world_size(), m)
    pipeline = Pipeline(_Slow(unit_s), schedule, mse_loss)
    (x,), target = batch("plain", m)
    best = 1.0
    for _ in range(3):
        dist.barrier()
        # with a gradient of the first input, so that all stages take as long
        pipeline.step(x.requires_grad_(), target=target)
        spans = pipeline.timeline.spans
        lasted_s = spans[-1].end_s - spans[0].start_s
        best = min(best, 1 - 3 * m * unit_s / lasted_s)
    return best


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_h2"])
def test_the_bubble_is_the_simulated_one_within_3_points(pool: Any, name: str) -> None:
    p, m = 2, 4
    expected = simulate(SCHEDULES[name](p, m), Times(1.0, 1.0, 1.0)).bubble
    found = max(pool(p).run(_bubble, name, m, 0.1))
    assert found == pytest.approx(expected, abs=0.03)
