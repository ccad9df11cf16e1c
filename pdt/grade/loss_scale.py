"""What lesson 08's dynamic loss scale must do: all ranks skip together, by one small call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial, Wrong
from pdt.grade.expect import expect

STEPS = 12
BAD = (math.inf, -math.inf, math.nan)
CALL_NBYTES = 16  # that a rank sends in a step: a few numbers, however they are told


def _trials(dice: Dice) -> Iterator[Trial]:
    """Now and then one rank has an inf or NaN; some finite gradients are as large as fp32 goes."""
    for n in (1, 2, 3, 4):
        for interval in (2, 3):
            scale = 2.0 ** dice.integer(4, 16)
            by_rank = [[_grads(dice) for _ in range(STEPS)] for _ in range(n)]
            for i, step in enumerate((2, 3, 8)):
                by_rank[dice.integer(0, n - 1)][step][1].view(-1)[dice.integer(0, 5)] = BAD[i]
            for step in (5, 9):
                by_rank[n - 1][step][0].fill_(3e38)  # finite, though a sum of two is not
            inputs = [(steps, scale, interval) for steps in by_rank]
            yield Trial(inputs, f"interval {interval}")


def _grads(dice: Dice) -> list[Tensor]:
    return [dice.normal((4,)), dice.normal((2, 3))]


def _drive(
    loss_scale: Callable[..., Any], steps: list[list[Tensor]], scale: float, interval: int
) -> list[Any]:
    """What is returned after each step; scale and count of good steps are passed on."""
    returned, good = [], 0
    for grads in steps:
        result = loss_scale(grads, scale, good, interval)
        returned.append(result)
        if type(result) is not tuple or len(result) != 3:
            break
        _, scale, good = result
    return returned


def _returned(run: Run, rank: int) -> list[tuple[Any, Any, Any]]:
    for result in run.ranks[rank].result:
        if type(result) is not tuple or len(result) != 3:
            raise Wrong("a tuple (step, scale, good)", f"{type(result).__name__} {result!r:.40}")
    return run.ranks[rank].result


def _steps_together(run: Run) -> None:
    all_grads = [steps for steps, _, _ in run.inputs]
    for step in range(STEPS):
        finite = all(bool(g.isfinite().all()) for steps in all_grads for g in steps[step])
        seen = [_returned(run, rank)[step][0] for rank in range(run.world_size)]
        expect(seen == [finite] * run.world_size, f"step {step}: {finite} on all ranks", seen)


def _follows_the_rule(run: Run) -> None:
    """Given what the rank decided itself."""
    for rank in range(run.world_size):
        (_, scale, interval), good = run.inputs[rank], 0
        for number, (step, seen_scale, seen_good) in enumerate(_returned(run, rank)):
            good = good + 1 if step else 0
            scale = scale if step else scale / 2
            if good == interval:
                scale, good = 2 * scale, 0
            told, seen = f"scale {scale:g}, good {good}", f"scale {seen_scale}, good {seen_good}"
            right = (seen_scale, seen_good) == (scale, good)
            expect(right, f"after step {number} on rank {rank}: {told}", seen)


def _unscales(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        given, scale, _ = run.inputs[rank]
        for number, (step, next_scale, _) in enumerate(_returned(run, rank)):
            pairs = zip(seen.args[0][number], given[number], strict=True)
            right = not step or all(_same(g, was / scale) for g, was in pairs)
            what = f"step {number} on rank {rank}: the gradients divided by {scale:g}"
            expect(right, what, "other values")
            scale = next_scale


def _same(a: Tensor, b: Tensor) -> bool:
    """To the bit; NaN is NaN, of a rank that did not see one."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _agrees_cheaply(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        calls, nbytes = len(seen.records), seen.wire_nbytes
        what = f"{STEPS} calls and {STEPS * CALL_NBYTES} bytes at most in {STEPS} steps"
        good = calls <= STEPS and nbytes <= STEPS * CALL_NBYTES
        expect(good, f"{what} on rank {rank}", f"{calls} calls, {nbytes:,.0f} bytes")


LOSS_SCALE = Exercise(
    name="loss_scale",
    points=2,
    minutes=20,
    trials=_trials,
    drive=_drive,
    poison=("torch.amp.GradScaler",),
    properties=(
        Property(
            "steps when all gradients of all ranks are finite, and only then",
            _steps_together,
            "decide by the maximum over ranks of 'one of mine is not finite'; NaN counts as well.",
        ),
        Property(
            "halves the scale on overflow and doubles it after interval good steps",
            _follows_the_rule,
            "a skipped step sets the count of good steps to 0, and so does a doubling.",
        ),
        Property(
            "unscales by the scale that the loss had",
            _unscales,
            "divide in place by the scale that was passed in, before you change it.",
        ),
        Property(
            "agrees by one small call",
            _agrees_cheaply,
            "one number for all gradients together, in one all-reduce.",
        ),
    ),
)
