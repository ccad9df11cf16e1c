"""What lesson 07's exercises must do: one copy for all ranks, sums in turn, updates in slices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_tensor
from pdt.grade.share_parameters import SHARE_PARAMETERS
from pdt.grade.slice_optimizer import SLICE_OPTIMIZER
from pdt.segment import exchange

SLOW_S = 0.15  # by which one rank comes late


def shared_tensor(key: str, numel: int) -> Tensor:
    """A flat float32 tensor (numel,) of zeros, the same memory on all ranks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    segments = exchange(_get_default_store(), key, rank, n, max(4 * numel, 1))
    return segments[0].tensor(torch.float32, numel)


def _turn_trials(dice: Dice) -> Iterator[Trial]:
    """Whole numbers; one large term that swallows small ones in another order; a late rank."""
    for n in (1, 2, 3, 4):
        for label in ("whole numbers", "an order that shows", "a rank that comes late"):
            numel = dice.integer(3, 50)
            grads = [dice.normal((numel,)) * 10.0 ** dice.integer(0, 6) for _ in range(n)]
            if label == "whole numbers":
                grads = [n * dice.integers((numel,)) for _ in range(n)]
            slow = dice.integer(0, n - 1) if "late" in label else -1
            key = f"turn/{dice.integer(0, 2**30)}"
            yield Trial([(grad, key, slow) for grad in grads], label)


def _in_turn(
    add_in_turn: Callable[..., Any], grad: Tensor, key: str, slow: int
) -> tuple[Tensor, Tensor]:
    """The sum right after the call and once all are done; what was there before is old."""
    total = shared_tensor(key, grad.numel())
    total.fill_(77)
    dist.barrier()
    if dist.get_rank() == slow:
        time.sleep(SLOW_S)
    add_in_turn(total, grad)
    at_once = total.clone()
    dist.barrier()
    return at_once, total.clone()


def _mean(run: Run) -> Tensor:
    """g_0 / n + g_1 / n + ..., in this order."""
    return reduce(torch.add, [grad / run.world_size for grad, *_ in run.inputs])


def _is_the_mean(run: Run) -> None:
    mean = _mean(run)
    near = 1e-5 * max(grad.abs().max().item() for grad, *_ in run.inputs)  # in any order
    for rank, seen in enumerate(run.ranks):
        expect_tensor(seen.result[1], mean, f"in the end rank {rank}'s total", atol=near)


def _adds_in_order(run: Run) -> None:
    if "order" in run.trial.label:
        for rank, seen in enumerate(run.ranks):
            same = torch.equal(seen.result[1], _mean(run))
            expect(
                same, "the bits of g_0/n + g_1/n + ... in the order of ranks", f"others ({rank})"
            )


def _is_whole_at_once(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        what = f"rank {rank}'s total when it returns, as in the end,"
        expect_tensor(seen.result[0], seen.result[1], what)


def _sends_nothing(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        expect(seen.wire_nbytes == 0, f"no bytes sent by rank {rank}", f"{seen.wire_nbytes:,.0f}")


ADD_IN_TURN = Exercise(
    name="add_in_turn",
    points=2,
    minutes=15,
    trials=_turn_trials,
    drive=_in_turn,
    poison=("pdt.ddp.shared_memory.NodeMemory",),
    properties=(
        Property(
            "total becomes the mean of all gradients",
            _is_the_mean,
            "rank 0 writes over what is there, the others add; each divides its own part.",
        ),
        Property(
            "adds in the order of ranks",
            _adds_in_order,
            "rank r may begin when rank r - 1 has ended: a barrier after each turn.",
        ),
        Property(
            "is whole on every rank when it returns",
            _is_whole_at_once,
            "nobody may leave before the last rank has added.",
        ),
        Property(
            "sends no bytes",
            _sends_nothing,
            "the memory is shared: dist.barrier() is all the communication there is to do.",
        ),
    ),
)

EXERCISES = (SHARE_PARAMETERS, ADD_IN_TURN, SLICE_OPTIMIZER)
