"""Lesson 12's exercise on segments: the most that a checkpointed chain keeps, in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect_close, expect_int
from pdt.measure.memory import Ledger
from pdt.offload.checkpoint import checkpoint

MEASURED = "measured"


class Keeps(torch.autograd.Function):
    """Maps x to so many bytes, and keeps x and so many bytes more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept_nbytes: int, out_nbytes: int) -> Tensor:
        ctx.save_for_backward(x, torch.zeros(kept_nbytes // 4))
        return torch.zeros(out_nbytes // 4)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.zeros_like(ctx.saved_tensors[0]), None, None


def _trials(dice: Dice) -> Iterator[Trial]:
    """Equal layers, unequal ones, the largest anywhere; one segment, all alone, and between."""
    for count in (1, 4, 6, 9):
        for number in range(3):
            equal = number == 0
            inputs = [4 * dice.integer(2000, 9000) for _ in range(1 if equal else count)]
            kept = [4 * dice.integer(500, 30_000) for _ in inputs]
            inputs, kept = (sizes * (count if equal else 1) for sizes in (inputs, kept))
            lengths = _lengths(dice, count, number)
            label = f"{count} layers in segments of {lengths}"
            yield Trial([(inputs, kept, lengths)], label)


def _lengths(dice: Dice, count: int, number: int) -> list[int]:
    if number == 1:
        return dice.choice(([count], [1] * count))
    lengths: list[int] = []
    while (left := count - sum(lengths)) > 0:
        lengths.append(min(left, dice.integer(1, 4)))
    return lengths


def measure(inputs: list[int], kept: list[int], lengths: list[int]) -> int:
    """The most activations of a real chain, by the ledger."""

    def segment(x: Tensor, start: int, length: int) -> Tensor:
        for i in range(start, start + length):
            x = Keeps.apply(x, kept[i], inputs[i + 1] if i + 1 < len(inputs) else 4)
        return x

    with Ledger() as ledger:
        x, start = torch.zeros(inputs[0] // 4, requires_grad=True), 0
        for length in lengths:
            x = checkpoint(segment, x, start, length)
            start += length
        x.sum().backward()
    return max(kinds["activations"] for _, kinds in ledger.timeline)


def predict(inputs: list[int], kept: list[int], lengths: list[int]) -> int:
    """The same in closed form."""
    most = waiting = start = 0
    for length in lengths:
        end = start + length
        waiting += inputs[start]
        most = max(most, waiting + sum(kept[start:end]) + sum(inputs[start + 1 : end]))
        start = end
    return most


def _drive(segment_peak: Callable[..., Any], *args: Any) -> dict[str, Any]:
    predicted = segment_peak(*(list(sizes) for sizes in args))
    return {"predicted": predicted, MEASURED: measure(*args)}


def _is_exact(run: Run) -> None:
    expect_int(run.ranks[0].result["predicted"], predict(*run.inputs[0]), "the peak in bytes")


def _is_near(run: Run) -> None:
    seen = run.ranks[0].result
    expect_close(seen["predicted"], seen[MEASURED], 0.05, "the measured peak")


SEGMENT_PEAK = Exercise(
    name="segment_peak",
    points=2,
    minutes=15,
    trials=_trials,
    drive=_drive,
    properties=(
        Property(
            "is exact",
            _is_exact,
            "write down what is kept when backward has just run each segment again, and take the "
            "largest: its own tensors, and the inputs of the segments before it.",
        ),
        Property(
            "is within 5 % of a run",
            _is_near,
            "which inputs are there when a segment has been run again? Those of later segments "
            "are gone, and inside the segment each layer's input is kept, too.",
        ),
    ),
)
