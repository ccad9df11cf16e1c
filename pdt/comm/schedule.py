"""Who sends what to whom, planned without a process group: shards, the ring and the tree."""

from __future__ import annotations

import torch
from torch import Tensor


def shard_numel(numel: int, rank: int, n: int) -> int:
    """Elements in shard `rank` of `n`: the first `numel % n` shards hold one more."""
    return numel // n + (rank < numel % n)


def shards(tensor: Tensor, n: int) -> tuple[Tensor, ...]:
    """The tensor's elements as n flat shards, views where it is contiguous (see `shard_numel`)."""
    return torch.tensor_split(tensor.detach().contiguous().view(-1), n)


def ring_steps(start: int, n: int) -> list[tuple[int, int]]:
    """For each of n-1 steps the shards (to send on, to receive) of a rank that begins by `start`.

    What arrives in one step is sent on in the next. An all-gather begins by the rank's own shard; a
    reduce-scatter one earlier, so that the last shard to arrive is its own.
    """
    return [((start - step) % n, (start - step - 1) % n) for step in range(n - 1)]


def tree_rounds(n: int) -> list[list[tuple[int, int]]]:
    """Rounds of (sender, receiver) in which 0 reaches all: those who have it double each round."""
    rounds, have = [], 1
    while have < n:
        rounds.append([(i, i + have) for i in range(min(have, n - have))])
        have *= 2
    return rounds
