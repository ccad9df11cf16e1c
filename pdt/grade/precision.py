"""What lesson 08's exercises must do: lose nothing for good, skip together, sum in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdt.ddp.hooks import GradBucket
from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect_sent, expect_tensor
from pdt.grade.loss_scale import LOSS_SCALE

ONCE, LONG, SEVERAL = "one step", "some steps, then zeros", "two buckets, then zeros"


def _feedback_trials(dice: Dice) -> Iterator[Trial]:
    """One step whose ranks choose some positions alike; runs that end in steps of zeros."""
    for n in (1, 2, 3, 4):
        numel, k = dice.integer(180, 240), dice.integer(4, 7)
        common = 5 * dice.normal((numel,))
        inputs = [([[common + dice.normal((numel,))]], k) for _ in range(n)]
        yield Trial(inputs, ONCE)
        for label, buckets in ((LONG, 1), (SEVERAL, 2)):
            numel, k = dice.integer(40, 60), 8
            inputs = [(_steps(dice, buckets, numel, k), k) for _ in range(n)]
            yield Trial(inputs, label)


def _steps(dice: Dice, buckets: int, numel: int, k: int) -> list[list[Tensor]]:
    zeros = numel // k + 3
    return [
        [dice.normal((numel,), torch.float64) * (step < 3) for _ in range(buckets)]
        for step in range(3 + zeros)
    ]


def _drive_feedback(
    error_feedback: Callable[[int], Any], steps: list[list[Tensor]], k: int
) -> list[list[Tensor]]:
    """What the hook leaves of each bucket in each step."""
    hook = error_feedback(k)
    return [_as_ddp_does(hook, grads) for grads in steps]


def _as_ddp_does(hook: Callable[..., Any], grads: Sequence[Tensor]) -> list[Tensor]:
    """All buckets' first rounds are started, then each waits and goes on, in turn."""
    flats = [grad.clone() for grad in grads]
    waiting: list[tuple[Iterator[Any], Any]] = []
    for index, flat in enumerate(flats):
        bucket = GradBucket(index, flat, [flat], is_last=index == len(flats) - 1)
        rounds = iter(hook(bucket, None))
        waiting.append((rounds, next(rounds, None)))
    while waiting:
        started, waiting = [each for each in waiting if each[1] is not None], []
        for rounds, work in started:
            work.wait()
            waiting.append((rounds, next(rounds, None)))
    return flats


def _largest(grads: Tensor, k: int) -> Tensor:
    """The k largest by size, zero elsewhere."""
    kept = torch.zeros_like(grads)
    where = grads.abs().topk(k).indices
    kept[where] = grads[where]
    return kept


def _adds_the_largest(run: Run) -> None:
    if run.trial.label != ONCE:
        return
    terms = [_largest(steps[0][0], k) for steps, k in run.inputs]
    for rank, seen in enumerate(run.ranks):
        total = sum(terms, torch.zeros_like(terms[0]))
        expect_tensor(seen.result[0][0], total, f"rank {rank}'s bucket", rtol=1e-6, atol=1e-6)


def _loses_nothing(label: str) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        if run.trial.label != label:
            return
        for index in range(len(run.inputs[0][0][0])):
            true = sum(step[index] for steps, _ in run.inputs for step in steps)
            for rank, seen in enumerate(run.ranks):
                applied = sum(step[index] for step in seen.result)
                what = f"bucket {index} on rank {rank}, all steps together,"
                expect_tensor(applied, true, what, atol=1e-9)

    return check


def _sends_k(run: Run) -> None:
    """(n-1) times k values and k indices of 4 bytes, for each bucket in each step."""
    steps, k = run.inputs[0]
    itemsize, n = steps[0][0].element_size(), run.world_size
    allowed = len(steps) * len(steps[0]) * (n - 1) * k * (4 + itemsize)
    expect_sent(run, [0] * n, [allowed] * n)


ERROR_FEEDBACK = Exercise(
    name="error_feedback",
    points=3,
    minutes=25,
    trials=_feedback_trials,
    drive=_drive_feedback,
    poison=("pdt.ddp.compress.TopK",),
    properties=(
        Property(
            "adds up each rank's k largest gradients",
            _adds_the_largest,
            "choose by size, not by sign; where ranks chose alike, add (index_add_).",
        ),
        Property(
            "loses nothing in the long run",
            _loses_nothing(LONG),
            "add what was kept, send the largest, and keep the rest: all but what was sent.",
        ),
        Property(
            "keeps a rest for each bucket",
            _loses_nothing(SEVERAL),
            "keep one tensor for each bucket.index: rounds of buckets alternate.",
        ),
        Property(
            "sends k values and k indices of 4 bytes",
            _sends_k,
            "all-gather k values and k indices (torch.int32), not tensors of the bucket's size.",
        ),
    ),
)


def _sum_trials(dice: Dice) -> Iterator[Trial]:
    """Whole numbers that bf16 holds, whose sums it does not hold; even parts and uneven ones."""
    for n in (1, 2, 3, 4):
        for shape in ((n, 48), (12 * n * dice.integer(2, 9),), (7 * n + 1, 5), (12 * n - 1, 7)):
            yield Trial([(_whole(dice, shape),) for _ in range(n)], f"shape {shape}")
        if n > 1:
            yield Trial([(_whole(dice, (n - 1,)),) for _ in range(n)], f"{n - 1} elements")


def _whole(dice: Dice, shape: tuple[int, ...]) -> Tensor:
    return (120 * dice.normal(shape) + 60).round().clamp(-255, 255).bfloat16()


def _drive_sum(fp32_sum: Callable[[Tensor], Any], tensor: Tensor) -> None:
    fp32_sum(tensor)
    dist.barrier()


def _sums(even: bool) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        terms = [tensor for (tensor,) in run.inputs]
        if (terms[0].numel() % run.world_size == 0) is not even:
            return
        total = torch.stack([term.float() for term in terms]).sum(0).bfloat16()
        for rank, seen in enumerate(run.ranks):
            expect_tensor(seen.args[0], total, f"rank {rank}'s tensor")

    return check


def _sends_no_more(run: Run) -> None:
    """2(n-1) parts of bf16, each of 1/n of the tensor, rounded up to whole elements."""
    n, numel = run.world_size, run.inputs[0][0].numel()
    expect_sent(run, [0] * n, [2 * (n - 1) * -(-numel // n) * 2] * n)


FP32_SUM = Exercise(
    name="fp32_sum",
    points=2,
    minutes=15,
    trials=_sum_trials,
    drive=_drive_sum,
    poison=("pdt.ddp.hooks.fp32_sum_hook",),
    properties=(
        Property(
            "holds the sum, added in fp32 and rounded once",
            _sums(even=True),
            "add the parts that arrived with dtype=torch.float32, then round to bf16.",
        ),
        Property(
            "takes any number of elements",
            _sums(even=False),
            "pad to n parts of one length with zeros, and drop them in the end.",
        ),
        Property(
            "sends no more than an all-reduce of bf16",
            _sends_no_more,
            "an all-to-all of bf16 parts, a local sum, an all-gather of bf16 sums.",
        ),
    ),
)

EXERCISES = (ERROR_FEEDBACK, LOSS_SCALE, FP32_SUM)
