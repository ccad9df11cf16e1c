"""What lesson 04's exercises must do: deal samples, average gradients flat, average over tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial, Wrong
from pdt.grade.expect import expect
from pdt.grade.flat_sync import FLAT_SYNC
from pdt.grade.token_sync import TOKEN_SYNC

ENOUGH = 40  # samples, from which two shuffles are never the same by chance


def _shard_trials(dice: Dice) -> Iterator[Trial]:
    """Numbers that divide, that do not, that are fewer than the ranks; three epochs of each."""
    for n in (1, 2, 3, 4):
        many = n * dice.integer(20, 40) + ENOUGH
        for num_samples in (many - many % n, many - many % n + n - 1, n * 3 + 1, n - 1):
            epochs = [dice.integer(0, 9), dice.integer(10, 19), dice.integer(20, 29)]
            inputs = [(num_samples, epochs, dice.integer(0, 10**6)) for _ in range(n)]
            yield Trial(inputs, f"{num_samples} samples")


def _deal(shard: Callable[..., Any], num_samples: int, epochs: list[int], seed: int) -> list:
    """This rank's shares; the ranks' own sources of chance do not agree, as in real programs."""
    torch.manual_seed(seed)
    random.seed(seed)
    rank, n = dist.get_rank(), dist.get_world_size()
    shares = [shard(num_samples, rank, n, epoch) for epoch in epochs]
    return [list(share) if isinstance(share, range) else share for share in shares]


def _shares(run: Run, epoch: int) -> list[list[int]]:
    """By rank: its samples in the trial's epoch of this position."""
    found = []
    for rank, seen in enumerate(run.ranks):
        share = seen.result[epoch]
        share = share.tolist() if type(share) is torch.Tensor else share
        if type(share) is not list or not all(type(sample) is int for sample in share):
            kind = type(share).__name__
            raise Wrong(f"a list of whole numbers on rank {rank}", f"{kind} {share!r:.40}")
        found.append(share)
    return found


def _each_once(run: Run) -> None:
    num_samples, epochs, _ = run.inputs[0]
    for position, epoch in enumerate(epochs):
        dealt = sorted(sample for share in _shares(run, position) for sample in share)
        if dealt == list(range(num_samples)):
            continue
        twice = sum(dealt.count(sample) > 1 for sample in set(dealt))
        missing = num_samples - len(set(dealt) & set(range(num_samples)))
        seen = f"{len(dealt)} dealt in epoch {epoch}: {twice} more than once, {missing} missing"
        raise Wrong(f"{num_samples} samples, each on one rank", seen)


def _evenly(run: Run) -> None:
    for position in range(len(run.inputs[0][1])):
        sizes = [len(share) for share in _shares(run, position)]
        expect(max(sizes) - min(sizes) <= 1, "shares that differ by 1 at most", sizes)


def _anew(run: Run) -> None:
    num_samples, epochs, _ = run.inputs[0]
    if num_samples < ENOUGH:
        return
    first, *others = ([set(share) for share in _shares(run, i)] for i in range(len(epochs)))
    orders = [_shares(run, i) for i in range(len(epochs))]
    if run.world_size > 1:
        same = any(first == other for other in others)
        expect(not same, "other shares in another epoch", "each rank keeps its samples")
    expect(all(orders[0] != order for order in orders[1:]), "another order", "the same order")


SHARD = Exercise(
    name="shard",
    points=2,
    minutes=10,
    trials=_shard_trials,
    drive=_deal,
    properties=(
        Property(
            "puts each sample on exactly one rank",
            _each_once,
            "all ranks must shuffle alike (a generator seeded by the epoch), then take every "
            "world_size-th sample: no padding, none dropped, never the whole data set.",
        ),
        Property(
            "deals as many to each rank, up to one",
            _evenly,
            "take every world_size-th sample, from the rank's own number on.",
        ),
        Property(
            "deals anew in each epoch",
            _anew,
            "shuffle all samples by the epoch first, then cut: a rank meets other samples.",
        ),
    ),
)

EXERCISES = (SHARD, FLAT_SYNC, TOKEN_SYNC)
