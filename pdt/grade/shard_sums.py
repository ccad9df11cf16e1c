"""Lesson 10's exercise on accumulation: as many backwards as there may be, one shard kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdt.comm.meter import meter
from pdt.flat import ShardLayout
from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_tensor
from pdt.measure.memory import Ledger

LR = 0.1
ALL, SOME = "all gradients", "some gradients missing"
COUNTS = {ALL: (1, 3, 2, 4), SOME: (1, 1, 1)}  # micro-batches, by step
NAPS, NAP_S = 4, 2e-3
SMALL_NBYTES = 1024
Micro = list[Tensor | None]


def _trials(dice: Dice) -> Iterator[Trial]:
    """Sizes that do not divide; in each step another number of micro-batches."""
    for n in (1, 2, 3, 4):
        for label, counts in COUNTS.items():
            shapes: list[tuple[int, ...]] = [(20, dice.integer(30, 40)), (7,), (), (12, 12)]
            shapes.append((1 + n - sum(torch.Size(shape).numel() for shape in shapes) % n,))
            start = [dice.normal(shape, torch.float64) for shape in shapes]
            inputs = [
                (start, [[_micro(dice, shapes, label) for _ in range(k)] for k in counts])
                for _ in range(n)
            ]
            if label == SOME:
                for _, steps in inputs:
                    steps[-1][-1][3] = None  # one that is missing on every rank
            yield Trial(inputs, label)


def _micro(dice: Dice, shapes: list[tuple[int, ...]], label: str) -> Micro:
    missing = dice.integer(0, len(shapes) - 1) if label == SOME else -1
    grads = [dice.normal(shape, torch.float64) for shape in shapes]
    return [None if i == missing else grad for i, grad in enumerate(grads)]


def _drive(
    ShardSums: Callable[..., Any], start: list[Tensor], steps: list[list[Micro]]
) -> list[dict[str, Any]]:
    """By step: the parameters, the bytes sent, and what is held after each `add`."""
    seen = []
    with Ledger() as ledger:
        params = [nn.Parameter(value.clone()) for value in start]
        given = [[[g if g is None else g.clone() for g in m] for m in step] for step in steps]
        sums = ShardSums(list(params), LR)
        for step in given:
            held, before = [], sum(ledger.live().values())
            with meter() as m:
                for grads in step:
                    _accumulate(params, grads)
                    sums.add()
                    held.append(_least(ledger) - before)
                sums.step()
            for param in params:
                param.grad = None
            values = [param.tolist() for param in params]
            seen.append({"params": values, "sent": m.total().wire_nbytes, "held": held})
    dist.barrier()
    return seen


def _accumulate(params: list[nn.Parameter], grads: Micro) -> None:
    """As a backward does."""
    for param, grad in zip(params, grads, strict=True):
        if grad is not None:
            param.grad = grad.clone() if param.grad is None else param.grad + grad


def _least(ledger: Ledger) -> int:
    """A thread of gloo's may let go a moment later."""
    readings = []
    for _ in range(NAPS):
        readings.append(sum(ledger.live().values()))
        time.sleep(NAP_S)
    return min(readings)


def _after(run: Run) -> list[list[Tensor]]:
    """The parameters after each step of one process."""
    values, n, found = [value.clone() for value in run.inputs[0][0]], run.world_size, []
    for step in range(len(run.inputs[0][1])):
        for _, steps in run.inputs:
            for grads in steps[step]:
                for i, grad in enumerate(grads):
                    if grad is not None:
                        values[i] = values[i] - LR * grad / n
        found.append(list(values))
    return found


def _updates(label: str) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        if run.trial.label != label:
            return
        for step, values in enumerate(_after(run)):
            k = len(run.inputs[0][1][step])
            for rank, seen in enumerate(run.ranks):
                for i, right in enumerate(values):
                    value = torch.tensor(seen.result[step]["params"][i], dtype=torch.float64)
                    when = f"after step {step + 1}, of {k} micro-batches"
                    what = f"rank {rank}'s parameter {i} {when}"
                    expect_tensor(value, right, what, rtol=1e-9, atol=1e-12)

    return check


def _shard_numel(run: Run) -> int:
    numels = tuple(value.numel() for value in run.inputs[0][0])
    return ShardLayout(numels, run.world_size).shard_numel


def _holds_a_shard(run: Run) -> None:
    allowed = 8 * _shard_numel(run) + SMALL_NBYTES
    for rank, seen in enumerate(run.ranks):
        for result in seen.result:
            for i, held in enumerate(result["held"]):
                what = f"{allowed:,} bytes at most after micro-batch {i + 1}"
                expect(held <= allowed, what, f"{held:,} on rank {rank}")


def _sends(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        for step, result in enumerate(seen.result):
            k = len(run.inputs[0][1][step])
            most = (k + 1) * (run.world_size - 1) * 8 * _shard_numel(run)
            what = f"{most:,} bytes at most in a step of {k} micro-batches"
            expect(result["sent"] <= most, what, f"{result['sent']:,.0f} on rank {rank}")


SHARD_SUMS = Exercise(
    name="ShardSums",
    points=2,
    minutes=20,
    trials=_trials,
    drive=_drive,
    poison=(
        "pdt.zero.zero2.Zero2",
        "pdt.zero.bucket.ShardedBucket",
        "torch.distributed.optim.ZeroRedundancyOptimizer",
    ),
    properties=(
        Property(
            "uses the sum over a step's micro-batches, in every step",
            _updates(ALL),
            "add this rank's shard of the mean in add(), use the sum in step(), and clear it.",
        ),
        Property(
            "counts a missing gradient as zero",
            _updates(SOME),
            "lay the gradients out in a buffer of zeros; skip a .grad that is None.",
        ),
        Property(
            "keeps no more than its shard between micro-batches",
            _holds_a_shard,
            "reduce in add(), set every .grad to None, and keep nothing of the whole size.",
        ),
        Property(
            "sends (k+1)(n-1)/n of the parameters in a step of k micro-batches",
            _sends,
            "one reduce-scatter in add(), one all-gather in step().",
        ),
    ),
)
