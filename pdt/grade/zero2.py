"""What lesson 10's exercises must do: free gradients during backward, add up shards, know the peak.

Here the first one; `shard_sums` and `gradient_peak` hold the others.
"""

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
from pdt.grade.gradient_peak import PREDICT_GRADIENT_PEAK
from pdt.grade.shard_sums import SHARD_SUMS
from pdt.measure.memory import Ledger

BACKWARDS, GROUPS, IN_FLIGHT = 2, 12, 2
NAPS, NAP_S = 3, 2e-3  # a thread of gloo's may let go a moment later
SMALL_NBYTES = 2048  # the loss, and other numbers


class Use(torch.autograd.Function):
    """x + (p · w); its backward calls `note`, then makes the gradient of p and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, w: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.w, ctx.note = w, note
        return x + (p * w).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note()
        return grad, grad * ctx.w, None, None


def layouts(numels: list[list[int]], n: int) -> list[ShardLayout]:
    """Of each group."""
    return [ShardLayout(tuple(group), n) for group in numels]


def _trials(dice: Dice) -> Iterator[Trial]:
    """Groups of one to three parameters; within a group gradients come in any order."""
    for n in (1, 2, 3, 4):
        numels = [_group(dice) for _ in range(GROUPS)]
        numels[dice.integer(0, GROUPS - 2)] = [1]  # fewer elements than ranks
        inputs = []
        for _ in range(n):
            grads = [
                [[dice.normal((k,), torch.float64) for k in group] for group in numels]
                for _ in range(BACKWARDS)
            ]
            orders = [_shuffled(dice, len(group)) for group in numels]
            inputs.append((numels, grads, orders))
        yield Trial(inputs, f"{GROUPS} groups")


def _group(dice: Dice) -> list[int]:
    """Elements of 2,500 to 3,000, in one to three parameters."""
    total, count = dice.integer(2500, 3000), dice.integer(1, 3)
    parts = [dice.integer(300, 700) for _ in range(count - 1)]
    return [*parts, total - sum(parts)]


def _shuffled(dice: Dice, count: int) -> list[int]:
    rest = list(range(count))
    return [rest.pop(dice.integer(0, len(rest) - 1)) for _ in range(count)]


def _drive(
    free_as_you_go: Callable[..., Any],
    numels: list[list[int]],
    grads: list[list[list[Tensor]]],
    orders: list[list[int]],
) -> list[dict[str, Any]]:
    """Of each backward: the shards, what `.grad` is left, bytes sent; at each gradient the bytes
    sent until then and the bytes that are held beside what was there before."""
    n, seen = dist.get_world_size(), []
    with Ledger() as ledger:
        groups = [[nn.Parameter(torch.zeros(k, dtype=torch.float64)) for k in g] for g in numels]
        shards = [torch.zeros(each.shard_numel, dtype=torch.float64) for each in layouts(numels, n)]
        given = [[[w.clone() for w in group] for group in backward] for backward in grads]
        free_as_you_go([list(group) for group in groups], shards)
        for weights in given:
            for param in (p for group in groups for p in group):
                param.grad = None
            seen.append(_backward(groups, shards, weights, orders, ledger))
    return seen


def _backward(
    groups: list[list[nn.Parameter]],
    shards: list[Tensor],
    weights: list[list[Tensor]],
    orders: list[list[int]],
    ledger: Ledger,
) -> dict[str, Any]:
    marks: list[tuple[int, float, int]] = []
    with meter() as m:

        def note(group: int) -> None:
            held = sum(ledger.live().values())
            for _ in range(NAPS):
                time.sleep(NAP_S)
                held = min(held, sum(ledger.live().values()))
            marks.append((group, m.total().wire_nbytes, held - before))

        x = torch.ones((), dtype=torch.float64, requires_grad=True)
        for g in reversed(range(len(groups))):  # the last one that is used is the first to come
            for i in reversed(orders[g]):
                x = Use.apply(x, groups[g][i], weights[g][i], lambda g=g: note(g))
        before = sum(ledger.live().values())
        x.backward()
    left = sum(p.grad is not None for group in groups for p in group)
    values = [shard.tolist() for shard in shards]
    return {"shards": values, "left": left, "sent": m.total().wire_nbytes, "marks": marks}


def _adds_the_mean(run: Run) -> None:
    n = run.world_size
    for g, layout in enumerate(layouts(run.inputs[0][0], n)):
        total = torch.zeros(layout.padded_numel, dtype=torch.float64)
        for step in range(BACKWARDS):
            for _, grads, _ in run.inputs:
                total[: layout.offsets[-1]] += torch.cat(grads[step][g]) / n
            for rank, seen in enumerate(run.ranks):
                shard = torch.tensor(seen.result[step]["shards"][g], dtype=torch.float64)
                there = max(0, min(layout.shard_numel, layout.offsets[-1] - rank * len(shard)))
                what = f"rank {rank}'s shard of group {g} after backward {step + 1}"
                right = total.chunk(n)[rank][:there]
                expect_tensor(shard[:there], right, what, rtol=1e-9, atol=1e-12)


def _keeps_no_grad(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        for result in seen.result:
            left = f"{result['left']} of them on rank {rank}"
            expect(result["left"] == 0, "every .grad is None after backward", left)


def _sends_once(run: Run) -> None:
    n = run.world_size
    shards = sum(layout.shard_numel for layout in layouts(run.inputs[0][0], n))
    wanted = (n - 1) * 8 * shards
    for rank, seen in enumerate(run.ranks):
        for result in seen.result:
            said = f"{result['sent']:,.0f} on rank {rank}"
            expect(result["sent"] <= wanted, f"{wanted:,} bytes sent at most", said)


def _sends_early(run: Run) -> None:
    """When a gradient is made, all groups before its own have left."""
    n = run.world_size
    numels = [layout.shard_numel for layout in layouts(run.inputs[0][0], n)]
    for rank, seen in enumerate(run.ranks):
        for result in seen.result:
            for group, sent, _ in result["marks"]:
                due = (n - 1) * 8 * sum(numels[:group])
                said = f"{sent:,.0f} bytes on rank {rank}"
                what = f"{group} groups ({due:,} bytes) sent when group {group} begins to come"
                expect(sent >= due, what, said)


def _holds_little(run: Run) -> None:
    """A buffer that fills, two groups on their way, one gradient, and shards that are added."""
    n, numels = run.world_size, run.inputs[0][0]
    largest = max(layout.padded_numel for layout in layouts(numels, n))
    gradient = max(numel for group in numels for numel in group)
    elements = largest + IN_FLIGHT * 2 * largest + gradient + 2 * largest // n
    allowed = 8 * elements + SMALL_NBYTES
    for rank, seen in enumerate(run.ranks):
        for result in seen.result:
            for group, _, held in result["marks"]:
                what = f"{allowed:,} bytes at most beside the shards, while group {group} comes"
                expect(held <= allowed, what, f"{held:,} on rank {rank}")


FREE_AS_YOU_GO = Exercise(
    name="free_as_you_go",
    points=3,
    minutes=30,
    trials=_trials,
    drive=_drive,
    poison=("pdt.zero.zero2.Zero2", "pdt.zero.bucket.ShardedBucket"),
    properties=(
        Property(
            "adds this rank's shard of the mean, in every backward",
            _adds_the_mean,
            "wait, divide by n, add to shards[g]; touch no buffer that is still on its way.",
        ),
        Property(
            "leaves no .grad behind",
            _keeps_no_grad,
            "set p.grad = None in the hook, when the gradient is in its group's buffer.",
        ),
        Property(
            "sends a group before the next one's gradients come",
            _sends_early,
            "start to reduce in the hook of the gradient that completes the group.",
        ),
        Property(
            "holds its shards, one group that fills and two on their way",
            _holds_little,
            "free each gradient in its hook; before a third group leaves, wait for the oldest.",
        ),
        Property(
            "sends (n-1)/n of the gradients in a backward",
            _sends_once,
            "reduce-scatter each group once: an owner needs its shard, and nobody else does.",
        ),
    ),
)

EXERCISES = (FREE_AS_YOU_GO, SHARD_SUMS, PREDICT_GRADIENT_PEAK)
