"""Lesson 02's exercise on a direct reduce-scatter, and what all exercises with messages share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import (
    expect_ops,
    expect_sent,
    expect_tensor,
    expect_unchanged,
    expect_waited,
    traffic,
)

LOW = (torch.bfloat16, torch.float16)
ONLY_MESSAGES = Property(
    "uses only send and recv",
    lambda run: expect_ops(run, "send", "recv"),
    "build it from dist.send, recv, isend and irecv: no collective of torch.",
)
NOTHING_IN_FLIGHT = Property(
    "leaves no message in flight",
    expect_waited,
    "wait() for the work of every isend and irecv before you return.",
)


def _trials(dice: Dice) -> Iterator[Trial]:
    """Whole numbers in uneven shards; one large term among small ones; terms whose order shows."""
    for n in (1, 2, 3, 4):
        for numel in (0, n - 1, n * dice.integer(2, 9) + 1):
            dtype = dice.choice((torch.float32, torch.int64))
            inputs = [dice.integers((numel,), dtype) for _ in range(n)]
            yield _trial(inputs, f"{numel} elements")
        for low, large in ((torch.bfloat16, 256), (torch.float16, 2048)):
            where = dice.integer(0, min(1, n - 1))  # early, so that it swallows all that follow
            numbers = [large if rank == where else 1 for rank in range(n)]
            inputs = [torch.full((n + 1, 3), number, dtype=low) for number in numbers]
            yield _trial(inputs, f"{large} on rank {where}, 1 elsewhere, {str(low)[6:]}")
        inputs = [dice.normal((101,)) for _ in range(n)]
        yield _trial(inputs, "normally distributed")


def _trial(inputs: list[torch.Tensor], label: str) -> Trial:
    shards = inputs[0].view(-1).tensor_split(len(inputs))
    outputs = [torch.full_like(shard, 77) for shard in shards]
    return Trial(list(zip(outputs, inputs, strict=True)), label)


def _sums(run: Run) -> list[torch.Tensor]:
    """By rank: its shard of the sum in the order of the ranks, in float32 where dtypes are low."""
    terms = [given[1].view(-1) for given in run.inputs]
    wide = [term.float() if term.dtype in LOW else term for term in terms]
    total = reduce(torch.add, wide).to(terms[0].dtype)
    return list(total.tensor_split(run.world_size))


def _expect_sums(run: Run, **tolerance: float) -> None:
    for rank, (seen, total) in enumerate(zip(run.ranks, _sums(run), strict=True)):
        expect_tensor(seen.args[0], total, f"rank {rank}'s output", **tolerance)


def _is_low(run: Run) -> bool:
    return run.inputs[0][1].dtype in LOW


def _sends_the_others_shards(run: Run) -> None:
    sent = [given[1].nbytes - given[0].nbytes for given in run.inputs]
    expect_sent(run, sent, sent)


REDUCE_SCATTER_ONCE = Exercise(
    name="reduce_scatter_once",
    points=3,
    minutes=25,
    trials=_trials,
    poison=(
        "pdt.comm.collectives.reduce_scatter",
        "pdt.comm.collectives.ring_reduce_scatter",
        "pdt.comm.collectives.all_to_all",
        "pdt.comm.collectives.arriving_terms",
        "pdt.comm.collectives.sum_in_order",
    ),
    properties=(
        ONLY_MESSAGES,
        Property(
            "rank r's output holds the sum of all shards r",
            lambda run: _expect_sums(run, rtol=0.05, atol=1e-4),
            "print the terms of one rank: is there one of every rank, its own included?",
        ),
        Property(
            "rounds float16 and bfloat16 once",
            lambda run: _expect_sums(run) if _is_low(run) else None,
            "add in float32, and let only the last step, into the output, round.",
        ),
        Property(
            "adds in the order of the ranks",
            lambda run: None if _is_low(run) else _expect_sums(run),
            "keep what arrives apart, by rank, and add when all is there: 0, 1, 2, ...",
        ),
        Property(
            "sends each other rank its shard, and no more",
            _sends_the_others_shards,
            "a message has the input's dtype and the size of one shard; widen after it arrived.",
            picture=traffic,
        ),
        Property(
            "leaves its input as it was",
            lambda run: expect_unchanged(run, 1),
            "one of the terms is a view of the input: `total += term` writes into it.",
        ),
        NOTHING_IN_FLIGHT,
    ),
)
