"""Lesson 07's exercise on an optimizer of which each rank runs its own slice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_tensor
from pdt.segment import exchange

SLOW_S = 0.1
STEPS = 2
CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "AdamW": torch.optim.AdamW,
}
SETTINGS = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 0.01, "weight_decay": 0.1}}


def _trials(dice: Dice) -> Iterator[Trial]:
    """Even and uneven slices, fewer elements than ranks; a late reader, a late writer."""
    for n in (1, 2, 3, 4):
        for numel in (n * dice.integer(10, 30), n * dice.integer(10, 30) + 1, max(1, n - 1)):
            for late in ("nobody", "reader", "writer") if numel % n else ("nobody",):
                optimizer = dice.choice(("SGD", "AdamW"))
                key = f"slice/{dice.integer(0, 2**30)}"
                start, grads = dice.normal((numel,)), dice.normal((STEPS, numel))
                slow = dice.integer(0, n - 1)
                label = f"{numel} elements, {optimizer}, late: {late}"
                yield Trial([(start, grads, optimizer, key, late, slow)] * n, label)


def _watched(base: type, address: int, ranges: list, slow: bool) -> type:
    """The optimizer class, which notes what it updates: from where to where in the flat tensor."""

    class Watched(base):
        def step(self, closure: Any = None) -> Any:
            if slow:
                time.sleep(SLOW_S)
            params = [p for group in self.param_groups for p in group["params"] if p.numel()]
            starts = [(p.data_ptr() - address) // 4 for p in params]
            ranges.append([(s, s + p.numel()) for s, p in zip(starts, params, strict=True)])
            return super().step(closure)

    return Watched


def _drive(
    SliceOptimizer: Callable[..., Any],
    start: Tensor,
    grads: Tensor,
    optimizer: str,
    key: str,
    late: str,
    slow: int,
) -> dict[str, Any]:
    """Steps on shared tensors: what a rank reads before and after each, and what it updates."""
    rank, n, numel = dist.get_rank(), dist.get_world_size(), start.numel()
    segments = exchange(_get_default_store(), key, rank, n, 8 * numel)
    param, grad = (segments[0].tensor(torch.float32, numel, 4 * numel * i) for i in range(2))
    param.copy_(start)
    dist.barrier()
    ranges: list = []
    chosen = _watched(
        CLASSES[optimizer], param.data_ptr(), ranges, late == "writer" and rank == slow
    )
    stepper = SliceOptimizer(param, grad, chosen, **SETTINGS[optimizer])
    before, after = [], []
    for now in grads:
        dist.barrier()
        grad.copy_(now)
        dist.barrier()
        if late == "reader" and rank == slow:
            time.sleep(SLOW_S)
        before.append(param.clone())
        stepper.step()
        after.append(param.clone())
    dist.barrier()
    return {"before": before, "after": after, "ranges": ranges, "final": param.clone()}


def _whole(run: Run) -> list[Tensor]:
    """The parameters after each step of one optimizer for all."""
    start, grads, optimizer, *_ = run.inputs[0]
    param = nn.Parameter(start.clone())
    stepper = CLASSES[optimizer]([param], **SETTINGS[optimizer])  # type: ignore[arg-type]
    after = []
    for grad in grads:
        param.grad = grad.clone()
        stepper.step()
        after.append(param.detach().clone())
    return after


def _updates_all(run: Run) -> None:
    """In the end, when all ranks are done."""
    final = _whole(run)[-1]
    for rank, seen in enumerate(run.ranks):
        what = f"rank {rank}'s parameters after {STEPS} steps"
        expect_tensor(seen.result["final"], final, what, rtol=1e-5, atol=1e-6)


def _owns_slices(run: Run) -> None:
    """Each rank updates ceil(numel / n) elements at most, nobody updates another's."""
    numel, n = run.inputs[0][0].numel(), run.world_size
    counts = [0] * numel
    for rank, seen in enumerate(run.ranks):
        pieces = seen.result["ranges"][0] if seen.result["ranges"] else []
        held = sum(stop - start for start, stop in pieces)
        most = -(-numel // n)
        expect(held <= most, f"rank {rank} updates {most} elements at most", held)
        for start, stop in pieces:
            for i in range(max(start, 0), min(stop, numel)):
                counts[i] += 1
    wrong = [i for i, count in enumerate(counts) if count != 1]
    if wrong:
        what = f"element {wrong[0]} by {counts[wrong[0]]} of them"
        expect(False, "each element updated by one rank", what)


def _look(run: Run, which: str, late: str, wanted: list[Tensor]) -> None:
    if run.inputs[0][4] != late or run.world_size == 1:
        return
    for rank, seen in enumerate(run.ranks):
        for step, (value, tensor) in enumerate(zip(seen.result[which], wanted, strict=True), 1):
            when = f"{which} step {step}"
            what = f"what rank {rank} reads {when}"
            expect_tensor(value, tensor, what, rtol=1e-5, atol=1e-6)


def _waits_before(run: Run) -> None:
    _look(run, "before", "reader", [run.inputs[0][0], *_whole(run)[:-1]])


def _waits_after(run: Run) -> None:
    _look(run, "after", "writer", _whole(run))


SLICE_OPTIMIZER = Exercise(
    name="SliceOptimizer",
    points=3,
    minutes=25,
    trials=_trials,
    drive=_drive,
    poison=("pdt.ddp.shared_optimizer.SharedOptimizer",),
    properties=(
        Property(
            "updates as one optimizer for all would",
            _updates_all,
            "give this rank's slice of the parameters the same slice of the gradients.",
        ),
        Property(
            "each rank updates 1/n of the elements",
            _owns_slices,
            "an optimizer keeps states for what it is given: give it a slice, on every rank.",
        ),
        Property(
            "changes nothing before all ranks have come",
            _waits_before,
            "a late rank still computes with the old parameters: a barrier before the update.",
        ),
        Property(
            "returns when all slices are new",
            _waits_after,
            "a fast rank would read old slices of a slow one: a barrier after the update.",
        ),
    ),
)
