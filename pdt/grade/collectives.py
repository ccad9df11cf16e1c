"""What lesson 02's exercises must do: collectives built from send and recv."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_sent, expect_tensor, traffic
from pdt.grade.reduce_scatter import NOTHING_IN_FLIGHT, ONLY_MESSAGES, REDUCE_SCATTER_ONCE

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
        ONLY_MESSAGES,
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
        NOTHING_IN_FLIGHT,
    ),
)


def _tree_trials(dice: Dice) -> Iterator[Trial]:
    """Root 0 and others, on full trees and on such as lack some of their leaves."""
    for n in (*WORLD_SIZES, 6):
        for root in sorted({0, dice.integer(1, n - 1)} if n > 1 else {0}):
            shape = dice.choice([(), (dice.integer(1, 9),), (3, dice.integer(1, 9))])
            dtype = dice.choice(DTYPES)
            yield Trial([(dice.integers(shape, dtype), root) for _ in range(n)], f"root {root}")


def _holds_the_roots(run: Run) -> None:
    root = run.inputs[0][1]
    for rank, seen in enumerate(run.ranks):
        expect_tensor(seen.args[0], run.inputs[root][0], f"rank {rank}'s tensor")


def _receives_once(run: Run) -> None:
    tensor, root = run.inputs[0]
    for rank, seen in enumerate(run.ranks):
        nbytes = sum(record.nbytes for record in seen.records if record.op == "recv")
        wanted = 0 if rank == root else tensor.nbytes
        expect(nbytes == wanted, f"rank {rank} receives {wanted} bytes", nbytes)


def _in_few_rounds(run: Run) -> None:
    """A port sends one message per round: a rank's k-th goes out k rounds after its tensor came."""
    n, root = run.world_size, run.inputs[0][1]
    arrives, reached = {root: 0}, [root]
    for rank in reached:  # grows as it is read
        sends = [record.peer for record in run.ranks[rank].records if record.op == "send"]
        for round_of_rank, peer in enumerate(sends, 1):
            if peer is not None and peer not in arrives:
                arrives[peer] = arrives[rank] + round_of_rank
                reached.append(peer)
    few = math.ceil(math.log2(n))
    expect(len(arrives) == n, "a way from the root to every rank", f"one to {sorted(arrives)}")
    expect(max(arrives.values()) <= few, f"{few} rounds", f"{max(arrives.values())} rounds")


BROADCAST_BY_TREE = Exercise(
    name="broadcast_by_tree",
    points=2,
    minutes=20,
    trials=_tree_trials,
    poison=(
        "pdt.comm.collectives.tree_broadcast",
        "pdt.comm.collectives.broadcast",
        "pdt.comm.collectives.naive_broadcast",
    ),
    properties=(
        ONLY_MESSAGES,
        Property(
            "every rank ends with the root's tensor",
            _holds_the_roots,
            "the tree is drawn for root 0: which position in it has a rank, when the root is r?",
        ),
        Property(
            "sends the tensor to each rank once",
            _receives_once,
            "a rank that holds the tensor, the root above all, receives nothing any more.",
            picture=traffic,
        ),
        Property(
            "takes ceil(log2 n) rounds",
            _in_few_rounds,
            "in each round let every rank that has the tensor send it to one that has not.",
            picture=traffic,
        ),
        NOTHING_IN_FLIGHT,
    ),
)

EXERCISES = (RING_ALL_REDUCE, BROADCAST_BY_TREE, REDUCE_SCATTER_ONCE)
