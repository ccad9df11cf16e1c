"""What lesson 03's all-reduce on two levels must do, and what it may send over the slow wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pdt.comm.record import Record
from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_tensor, traffic

SHAPES = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (1, 4), (4, 1), (2, 3), (3, 2))


def _two_level_trials(dice: Dice) -> Iterator[Trial]:
    """All ways to lay 1 to 4 ranks, and 6, on nodes; a number, uneven shards and even ones."""
    for nodes, ranks_per_node in SHAPES:
        n = nodes * ranks_per_node
        for shape in ((), (dice.integer(2, 5), 7), (12 * dice.integer(9, 40),)):
            inputs = [(dice.integers(shape), ranks_per_node) for _ in range(n)]
            label = f"{nodes} nodes of {ranks_per_node}, shape {shape}"
            yield Trial(inputs, label)


def _with_groups(all_reduce: Callable[..., Any], x: torch.Tensor, ranks_per_node: int) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    node, place = divmod(rank, ranks_per_node)
    inside = [range(k, k + ranks_per_node) for k in range(0, n, ranks_per_node)]
    across = [range(k, n, ranks_per_node) for k in range(ranks_per_node)]
    own = [dist.new_group(ranks) for ranks in inside][node]
    fellows = [dist.new_group(ranks) for ranks in across][place]
    all_reduce(x, own, fellows)
    for group in (own, fellows):  # each has threads of its own, and trials are many
        dist.destroy_process_group(group)


def _is_the_sum(run: Run) -> None:
    total = sum((x for x, _ in run.inputs), torch.zeros(()))
    for rank, seen in enumerate(run.ranks):
        expect_tensor(seen.args[0], total, f"rank {rank}'s tensor")


def crossing_nbytes(records: Sequence[Record], rank: int, ranks_per_node: int) -> float:
    """Bytes that the rank sends to other nodes: in messages, and in groups that span nodes."""
    node = rank // ranks_per_node

    def crosses(record: Record) -> bool:
        others = (record.peer,) if record.op == "send" else record.ranks
        return any(other is not None and other // ranks_per_node != node for other in others)

    return sum(record.wire_nbytes for record in records if crosses(record))


def _spares_the_wire(run: Run) -> None:
    """A ring over the nodes carries 2(m-1)/m of a shard; by messages, m parts rounded up."""
    x, ranks_per_node = run.inputs[0]
    nodes = run.world_size // ranks_per_node
    shard = -(-x.numel() // ranks_per_node)
    allowed = 2 * (nodes - 1) * -(-shard // nodes) * x.element_size()
    for rank, seen in enumerate(run.ranks):
        crossed = crossing_nbytes(seen.records, rank, ranks_per_node)
        what = f"{allowed:,} bytes at most from rank {rank} to other nodes"
        expect(crossed < allowed + 1, what, f"{crossed:,.0f}")


def _spares_the_node(run: Run) -> None:
    """Inside: a reduce-scatter and an all-gather; a little more, so that shards may be padded."""
    x, ranks_per_node = run.inputs[0]
    shard = -(-x.numel() // ranks_per_node)
    allowed = 2 * (ranks_per_node - 1) * shard * x.element_size()
    for rank, seen in enumerate(run.ranks):
        crossed = crossing_nbytes(seen.records, rank, ranks_per_node)
        inside = sum(record.wire_nbytes for record in seen.records) - crossed
        what = f"{allowed:,} bytes at most from rank {rank} inside its node"
        expect(inside < allowed + 1, what, f"{inside:,.0f}")


def _few_calls(run: Run) -> None:
    """Three collectives, or 2(r-1) + 2(m-1) messages each way; three more do no harm."""
    ranks_per_node = run.inputs[0][1]
    nodes = run.world_size // ranks_per_node
    allowed = 3 + 4 * (ranks_per_node - 1 + nodes - 1)
    for rank, seen in enumerate(run.ranks):
        calls = len(seen.records)
        expect(calls <= allowed, f"{allowed} calls at most on rank {rank}", calls)


TWO_LEVEL = Exercise(
    name="two_level_all_reduce",
    points=3,
    minutes=25,
    trials=_two_level_trials,
    drive=_with_groups,
    properties=(
        Property(
            "every rank ends with the sum of all tensors",
            _is_the_sum,
            "after the first phase each rank must hold its node's sum of one shard.",
        ),
        Property(
            "sends 2(m-1)/m of one shard to other nodes",
            _spares_the_wire,
            "only the shard that this rank holds may go across, and all ranks take part.",
            picture=traffic,
        ),
        Property(
            "sends 2(r-1)/r of the tensor inside its node",
            _spares_the_node,
            "reduce-scatter, then all-gather: no rank needs all tensors of its node.",
            picture=traffic,
        ),
        Property(
            "makes few calls",
            _few_calls,
            "one collective for each phase, or one message for each step of a ring.",
        ),
    ),
)
