"""What lesson 06's accumulation must do: many micro-batches, one reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pdt.comm.meter import meter
from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_tensor

WIDTH = 3


def build(weights: list[Tensor]) -> nn.Module:
    """Two layers of float64 with these weights and biases."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
    with torch.no_grad():
        for param, weight in zip(model.parameters(), weights, strict=True):
            param.copy_(weight)
    return model


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean over a micro-batch (B, WIDTH)."""
    return model(batch).square().mean()


def _trials(dice: Dice) -> Iterator[Trial]:
    shapes = [(WIDTH, WIDTH), (WIDTH,), (1, WIDTH), (1,)]
    for n, count in ((1, 3), (2, 1), (2, 4), (3, 2), (4, 3)):
        weights = [dice.normal(shape, torch.float64) for shape in shapes]
        size = dice.integer(1, 4)
        inputs = [
            (weights, [dice.normal((size, WIDTH), torch.float64) for _ in range(count)])
            for _ in range(n)
        ]
        yield Trial(inputs, f"{count} micro-batches")


def _drive(accumulate: Callable[..., Any], weights: list[Tensor], batches: list[Tensor]) -> Any:
    """Of a second and third window: gradients, calls, samples of each forward; buckets."""
    from pdt.ddp.ddp import DDP

    ddp = DDP(build(weights), bucket_cap_mb=0, first_bucket_mb=0)
    loss_of(ddp, batches[0]).backward()  # the first backward learns the order
    sizes: list[int] = []

    def spied(model: nn.Module, batch: Tensor) -> Tensor:
        sizes.append(len(batch))
        return loss_of(model, batch)

    seen = []
    for _ in range(2):
        ddp.zero_grad()
        sizes.clear()
        with meter() as m:
            accumulate(ddp, spied, [batch.clone() for batch in batches])
        grads = [None if p.grad is None else p.grad.clone() for p in ddp.parameters()]
        seen.append((grads, len(m.records), list(sizes)))
    return seen, len(ddp.buckets)


def _right_gradient(run: Run) -> None:
    model = build(run.inputs[0][0])
    every = [batch for _, batches in run.inputs for batch in batches]
    loss_of(model, torch.cat(every)).backward()
    for rank, seen in enumerate(run.ranks):
        for grads, _, _ in seen.result[0]:
            for i, (grad, param) in enumerate(zip(grads, model.parameters(), strict=True)):
                assert param.grad is not None
                what = f"the gradient of parameter {i} on rank {rank}"
                expect_tensor(grad, param.grad, what, rtol=1e-9, atol=1e-12)


def _one_reduction(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        windows, buckets = seen.result
        for _, calls, _ in windows:
            expect(calls == buckets, f"{buckets} calls, one a bucket", f"{calls} on rank {rank}")


def _one_at_a_time(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        wanted = [len(batch) for batch in run.inputs[rank][1]]
        for _, _, sizes in seen.result[0]:
            expect(sizes == wanted, f"forwards of {wanted} samples", f"{sizes} on rank {rank}")


ACCUMULATE = Exercise(
    name="accumulate",
    points=2,
    minutes=10,
    trials=_trials,
    drive=_drive,
    properties=(
        Property(
            "leaves the gradient of the mean over all micro-batches of all ranks",
            _right_gradient,
            "divide each loss by the number of micro-batches; the last one must be synchronised.",
        ),
        Property(
            "reduces once in a window",
            _one_reduction,
            "run forward and backward of all micro-batches but the last inside ddp.no_sync().",
        ),
        Property(
            "runs each micro-batch by itself",
            _one_at_a_time,
            "accumulation is for batches that do not fit: one forward for each micro-batch.",
        ),
    ),
)
