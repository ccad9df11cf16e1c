"""What lesson 02's exercises must do: collectives built from send and recv."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import (
    expect_ops,
    expect_sent,
    expect_tensor,
    expect_waited,
    traffic,
)

WORLD_SIZES = (1, 2, 3, 4)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def _trials(dice: Dice) -> Iterator[Trial]:
    """A number, nothing, fewer elements than ranks, uneven and even shards; every dtype."""
    for n in WORLD_SIZES:
        uneven = (n * dice.integer(2, 9) + 1,)
        for shape in (
            (),
            (0,),
            (n - 1,),
            uneven,
            (n, dice.integer(2, 9)),
            (dice.integer(300, 999),),
        ):
            dtype = dice.choice(DTYPES)
            inputs = [(dice.integers(shape, dtype),) for _ in range(n)]
            yield Trial(inputs, f"shape {shape}, {str(dtype).removeprefix('torch.')}")
    yield Trial([(dice.integers((7, 3)), (1, 3)) for _ in range(4)], "a group of ranks 1 and 3")


def _drive(all_reduce: Callable[..., Any], tensor: torch.Tensor, members: tuple = ()) -> None:
    if not members:
        all_reduce(tensor)
        return
    group = dist.new_group(members)
    if dist.get_rank() in members:
        all_reduce(tensor, group)


def _members(run: Run) -> tuple[int, ...]:
    given = run.inputs[0][1:]
    return given[0] if given else tuple(range(run.world_size))


def _is_the_sum(run: Run) -> None:
    members = _members(run)
    total = sum((run.inputs[rank][0] for rank in members), torch.tensor(0)).to(
        run.inputs[0][0].dtype
    )
    for rank, seen in enumerate(run.ranks):
        expected = total if rank in members else run.inputs[rank][0]
        expect_tensor(seen.args[0], expected, f"rank {rank}'s tensor")


def _is_alike(run: Run) -> None:
    first, *others = _members(run)
    for rank in others:
        expect_tensor(
            run.ranks[rank].args[0],
            run.ranks[first].args[0],
            f"rank {rank}'s tensor, as rank {first}'s,",
        )


def _sends_least(run: Run) -> None:
    """Two phases of n-1 shards each; an uneven shard may be one element more or padded."""
    members = _members(run)
    n, tensor = len(members), run.inputs[0][0]
    largest = -(-tensor.numel() // n)
    low = 2 * (tensor.numel() - largest) * tensor.element_size()
    high = 2 * (n - 1) * largest * tensor.element_size()
    inside = [rank in members for rank in range(run.world_size)]
    expect_sent(run, [low * i for i in inside], [high * i for i in inside])


RING_ALL_REDUCE = Exercise(
    name="ring_all_reduce",
    points=3,
    minutes=30,
    trials=_trials,
    drive=_drive,
    poison=(
        "pdt.comm.collectives.ring_all_reduce",
        "pdt.comm.collectives.all_reduce",
        "pdt.comm.collectives.ring_reduce_scatter",
        "pdt.comm.collectives.reduce_scatter",
        "pdt.comm.collectives.ring_all_gather",
        "pdt.comm.collectives.all_gather",
    ),
    properties=(
        Property(
            "uses only send and recv",
            lambda run: expect_ops(run, "send", "recv"),
            "build it from dist.send, recv, isend and irecv: no collective of torch.",
        ),
        Property(
            "every rank ends with the sum of all tensors",
            _is_the_sum,
            "print one rank's shards after each step; numel need not be a multiple of n.",
        ),
        Property(
            "every rank ends with the same bits",
            _is_alike,
            "in the second phase pass finished shards on as they are, and add nothing.",
        ),
        Property(
            "sends 2(n-1)/n of the tensor",
            _sends_least,
            "in each of the 2(n-1) steps a rank sends one shard to its right neighbour, no more.",
            picture=traffic,
        ),
        Property(
            "leaves no message in flight",
            expect_waited,
            "wait() for the work of every isend and irecv before you return.",
        ),
    ),
)

EXERCISES = (RING_ALL_REDUCE,)
