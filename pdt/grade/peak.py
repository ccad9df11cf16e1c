"""Lesson 11's exercise on the peak of a step: a formula, and a run on real storages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdt.flat import ShardLayout
from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect_close, expect_int

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def _trials(dice: Dice) -> Iterator[Trial]:
    """Units of one size and of several, the largest anywhere; resharded or not; 0 to all ahead."""
    for n in (1, 2, 3, 4):
        for reshard in (True, False):
            for ahead in (0, 1, 2, 99):
                count = dice.integer(4, 7)
                numels = [dice.integer(20, 400) for _ in range(count)]
                numels[dice.integer(0, count - 1)] *= 5
                if ahead == 0:
                    numels = [numels[0]] * count
                item = dice.choice(sorted(DTYPES))
                kind = "resharded" if reshard else "kept"
                label = f"{numels} elements, {kind} after forward, {ahead} ahead, {item} bytes each"
                yield Trial([(numels, n, ahead, reshard, item)] * n, label)


class _Held:
    """Storages that a step has, made and freed as the lesson says; the most there was."""

    def __init__(self, layouts: list[ShardLayout], dtype: torch.dtype) -> None:
        self.layouts, self.dtype = layouts, dtype
        self.tensors: dict[tuple[str, int], Tensor] = {}
        self.peak = 0

    def hold(self, what: str, i: int, numel: int) -> None:
        self.tensors.setdefault((what, i), torch.zeros(numel, dtype=self.dtype))
        total = sum(t.untyped_storage().nbytes() for t in self.tensors.values())
        self.peak = max(self.peak, total)

    def free(self, what: str, i: int) -> None:
        self.tensors.pop((what, i)).untyped_storage().resize_(0)

    def gather(self, i: int, step: int, ahead: int) -> None:
        """Unit i and those that come after it, as far as there are any."""
        for j in range(i, i + step * (ahead + 1), step):
            if 0 <= j < len(self.layouts):
                self.hold("whole", j, self.layouts[j].padded_numel)


def measure(numels: list[int], n: int, ahead: int, reshard: bool, item: int) -> int:
    """The most bytes that one step holds on real storages."""
    layouts = [ShardLayout((numel,), n) for numel in numels]
    held = _Held(layouts, DTYPES[item])
    for i, layout in enumerate(layouts):
        held.hold("shard", i, layout.shard_numel)
    for i in range(len(layouts)):
        held.gather(i, 1, ahead)
        if reshard:
            held.free("whole", i)
    for i in reversed(range(len(layouts))):
        held.gather(i, -1, ahead)
        held.hold("gradient", i, layouts[i].padded_numel)
        held.free("whole", i)
        held.free("gradient", i)
        held.hold("shard's gradient", i, layouts[i].shard_numel)
    return held.peak


def predict(numels: list[int], n: int, ahead: int, reshard: bool, item: int) -> int:
    """The same in closed form."""
    shards = [-(-numel // n) for numel in numels]
    wholes, last, most = [n * shard for shard in shards], len(numels) - 1, 0
    for i in range(len(numels)):
        before = sum(wholes[:i]) if not reshard else 0
        most = max(most, before + sum(wholes[i : i + ahead + 1]))
    for i in range(last, -1, -1):
        first = 0 if not reshard else max(i - ahead, 0)
        most = max(most, sum(wholes[first : i + 1]) + wholes[i] + sum(shards[i + 1 :]))
    return item * (sum(shards) + most)


def _drive(predict_peak: Callable[..., Any], *args: Any) -> dict[str, Any]:
    predicted = predict_peak(*args)
    measured = measure(*args)
    dist.barrier()
    return {"predicted": predicted, "measured": measured}


def _is_exact(run: Run) -> None:
    for seen in run.ranks:
        expect_int(seen.result["predicted"], predict(*run.inputs[0]), "the peak in bytes")


def _is_near(run: Run) -> None:
    for seen in run.ranks:
        measured = seen.result["measured"]
        expect_close(seen.result["predicted"], measured, 0.05, "the measured peak")


PREDICT_PEAK = Exercise(
    name="predict_peak",
    points=2,
    minutes=20,
    trials=_trials,
    drive=_drive,
    properties=(
        Property(
            "is exact",
            _is_exact,
            "write down what is held at each moment of a step with two units, padding included, "
            "and take the largest.",
        ),
        Property(
            "is within 5 % of a run on real storages",
            _is_near,
            "which is the worst moment: which unit computes, and in which direction?",
        ),
    ),
)
