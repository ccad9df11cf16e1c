"""Lesson 10's exercise on the peak of a backward: a formula, and Zero2 in a ledger."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdt.buckets import MiB, assign_buckets
from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect_close
from pdt.measure.memory import Ledger

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
IN_FLIGHT = 2  # of Zero2
REPEATS = 2  # a thread of gloo's may let go a moment later; then more is seen
NAP_S = 2e-3
MEASURED, COMPUTED = "measured", "computed"


class Bare(torch.autograd.Function):
    """The identity of x, whose backward makes a gradient of p's size and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.like = p.shape, p.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(NAP_S)
        shape, dtype = ctx.like
        return grad, torch.ones(shape, dtype=dtype)


def _trials(dice: Dice) -> Iterator[Trial]:
    """Layers of one size, one or two in a bucket, measured; then others, computed alone.

    Zero2 uses buffers again, so with buckets of many sizes it may hold one that is too large.
    """
    for n in (2, 3, 4):
        item = dice.choice((4, 8))
        numel = dice.integer(80_000, 120_000)
        numels, cap_mb = [numel] * 24, dice.choice((0.5, 1.5)) * numel * item / MiB
        yield _trial(numels, n, IN_FLIGHT, item, cap_mb, MEASURED)
    for n, in_flight in ((2, 1), (3, 3), (1024, 1), (64, 8), (7, 99)):
        numels = [dice.integer(1, 10**6) for _ in range(dice.integer(30, 50))]
        item, cap_mb = dice.choice((2, 4, 8)), dice.integer(1, 8)
        yield _trial(numels, n, in_flight, item, cap_mb, COMPUTED)


def _trial(numels: list[int], n: int, in_flight: int, item: int, cap_mb: float, kind: str) -> Trial:
    buckets = planned(numels, item, cap_mb)
    label = f"{kind}: {len(buckets)} buckets, n = {n}, at most {in_flight} on their way"
    count = n if kind == MEASURED else 1
    return Trial([(buckets, n, in_flight, item, numels, cap_mb, kind)] * count, label)


def planned(numels: list[int], item: int, cap_mb: float) -> list[list[int]]:
    """The elements of each bucket's parameters, in the order of sending."""
    params = [torch.empty(numel, dtype=DTYPES[item], device="meta") for numel in numels]
    plan = assign_buckets(params, bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb)
    return [[numels[i] for i in bucket.params] for bucket in plan]


def peak(buckets: list[list[int]], n: int, in_flight: int, item: int) -> int:
    """The most bytes of gradients during a backward."""
    most, arrived, under_way = 0, 0, list[int]()
    for bucket in buckets:
        shard, held = -(-sum(bucket) // n), arrived + 2 * n * sum(under_way)
        most = max(most, held + bucket[0])
        if len(under_way) == in_flight:
            oldest = under_way.pop(0)
            most = max(most, held + bucket[0] + min(n - 2, 2) * oldest)
            arrived += oldest
        held = arrived + 2 * n * sum(under_way)
        most = max(most, held + n * shard + max(bucket), held + 2 * n * shard)
        under_way.append(shard)
    return item * max(most, arrived + 2 * n * sum(under_way) + min(n - 2, 2) * under_way[0])


def measure(numels: list[int], item: int, cap_mb: float) -> int:
    """What the ledger sees of Zero2's first backward: the least of some, each a new optimizer."""
    return min(_measure_once(numels, item, cap_mb) for _ in range(REPEATS))


def _measure_once(numels: list[int], item: int, cap_mb: float) -> int:
    from pdt.zero.zero2 import Zero2

    params = [nn.Parameter(torch.zeros(numel, dtype=DTYPES[item])) for numel in numels]
    optimizer = Zero2(params, torch.optim.SGD, lr=0.1, bucket_cap_mb=cap_mb)
    x = torch.ones((), dtype=torch.float64, requires_grad=True)
    with Ledger(optimizer=optimizer) as ledger:
        y = x
        for param in params:  # the last one that is used is the first to come
            y = Bare.apply(y, param)
        y.backward()
    kinds = ("gradients", "buckets", "other")
    return max(sum(totals[kind] for kind in kinds) for _, totals in ledger.timeline)


def _drive(
    predict_gradient_peak: Callable[..., Any],
    buckets: list[list[int]],
    n: int,
    in_flight: int,
    item: int,
    numels: list[int],
    cap_mb: float,
    kind: str,
) -> dict[str, Any]:
    predicted = predict_gradient_peak([list(bucket) for bucket in buckets], n, in_flight, item)
    measured = measure(numels, item, cap_mb) if kind == MEASURED else None
    dist.barrier()
    return {"predicted": predicted, "measured": measured}


def _as_measured(run: Run) -> None:
    if run.inputs[0][-1] == MEASURED:
        for rank, seen in enumerate(run.ranks):
            measured = seen.result["measured"]
            what = f"the peak of Zero2's gradients on rank {rank}, in bytes,"
            expect_close(seen.result["predicted"], measured, 0.05, what)


def _as_computed(run: Run) -> None:
    if run.inputs[0][-1] == COMPUTED:
        expected = peak(*run.inputs[0][:4])
        for seen in run.ranks:
            expect_close(seen.result["predicted"], expected, 0.01, "the peak in bytes")


PREDICT_GRADIENT_PEAK = Exercise(
    name="predict_gradient_peak",
    points=2,
    minutes=20,
    trials=_trials,
    drive=_drive,
    properties=(
        Property(
            "is within 5 % of what Zero2 holds",
            _as_measured,
            "go through the buckets in order: what is held when the last gradient of each comes?",
        ),
        Property(
            "is right for any limit and any number of ranks",
            _as_computed,
            "what was sent first arrives first, and of it only the shard stays.",
        ),
    ),
)
