"""Lesson 09's exercise on clipping: one norm for all, of what is spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial, Wrong
from pdt.grade.expect import expect, expect_tensor

ORDER_2, ORDERS, COPIES = "order 2", "another order", "replicated gradients"
EMPTY, BAD = "ranks without a shard", "not finite on one rank"
CALL_NBYTES = 64  # that a rank sends: a number or two to each other rank


def _trials(dice: Dice) -> Iterator[Trial]:
    """Above and below `max_norm`; every rank has other shards."""
    for n in (1, 2, 3, 4):
        for max_norm in (0.5, 1e6):
            yield _trial([_shards(dice) for _ in range(n)], [], max_norm, 2.0, ORDER_2)
        for order in (1.0, 3.0, math.inf):
            yield _trial([_shards(dice) for _ in range(n)], [], 0.5, order, ORDERS)
            copies = [10 * dice.normal((4,)), dice.normal(())]
            yield _trial([_shards(dice) for _ in range(n)], copies, 0.5, order, COPIES)
        copies = [10 * dice.normal((3, 2))]
        yield _trial([_shards(dice) for _ in range(n)], copies, 0.5, 2.0, COPIES)
        for order in (2.0, math.inf):
            full = dice.integer(0, n - 1)
            some = [_shards(dice) if rank == full else [] for rank in range(n)]
            some[(full + 1) % n] += [torch.zeros(0)]
            yield _trial(some, [], 0.5, order, EMPTY)
            for bad in (math.nan, math.inf):
                by_rank = [_shards(dice) for _ in range(n)]
                by_rank[dice.integer(0, n - 1)][0][1] = bad
                yield _trial(by_rank, [], 0.5, order, BAD)


def _trial(
    by_rank: list[list[Tensor]], copies: list[Tensor], max_norm: float, order: float, label: str
) -> Trial:
    inputs = [(shards, [c.clone() for c in copies], max_norm, order) for shards in by_rank]
    return Trial(inputs, f"{label}, norm_type {order:g}, max_norm {max_norm:g}")


def _shards(dice: Dice) -> list[Tensor]:
    """Two; the second ends in padding."""
    return [dice.normal((dice.integer(3, 30),)), torch.cat([dice.normal((5,)), torch.zeros(2)])]


def _drive(
    clip_sharded_: Callable[..., Any],
    shards: list[Tensor],
    replicated: list[Tensor],
    max_norm: float,
    norm_type: float,
) -> Any:
    return clip_sharded_(shards, replicated, max_norm, norm_type)


def _seen_norm(run: Run, rank: int) -> Tensor:
    norm = run.ranks[rank].result
    if type(norm) is not Tensor or norm.dim() or not norm.is_floating_point():
        raise Wrong("the norm as a 0-dim tensor", f"{type(norm).__name__} {norm!r:.40}")
    return norm.double()


def _norm(run: Run) -> Tensor:
    """Of all there is, each thing once."""
    tensors = [t for shards, *_ in run.inputs for t in shards] + run.inputs[0][1]
    whole = torch.cat([t.double().flatten() for t in tensors])
    return torch.linalg.vector_norm(whole, run.inputs[0][3])


def _returns_the_norm(label: str) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        if run.trial.label.startswith(label):
            for rank in range(run.world_size):
                expect_tensor(_seen_norm(run, rank), _norm(run), f"rank {rank}'s norm", rtol=1e-5)

    return check


def _scales(run: Run) -> None:
    """By what the rank itself returned."""
    for rank, seen in enumerate(run.ranks):
        shards, replicated, max_norm, _ = run.inputs[rank]
        factor = (max_norm / (_seen_norm(run, rank) + 1e-6)).clamp(max=1.0)
        before, after = [*shards, *replicated], [*seen.args[0], *seen.args[1]]
        for i, (given, scaled) in enumerate(zip(before, after, strict=True)):
            what = f"gradient {i} of rank {rank}"
            wanted = (given.double() * factor).float()
            expect_tensor(scaled, wanted, what, rtol=1e-5, atol=1e-7)


def _agrees_cheaply(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        calls, nbytes = len(seen.records), seen.wire_nbytes
        good = calls <= 1 and nbytes <= CALL_NBYTES
        what = f"one call and {CALL_NBYTES} bytes at most on rank {rank}"
        expect(good, what, f"{calls} calls, {nbytes:,.0f} bytes")


CLIP_SHARDED = Exercise(
    name="clip_sharded_",
    points=2,
    minutes=15,
    trials=_trials,
    drive=_drive,
    poison=("pdt.comm.norm.norm_over_ranks",),
    properties=(
        Property(
            "returns the norm of the whole gradient",
            _returns_the_norm(ORDER_2),
            "squares add up over ranks, norms do not; every rank needs the same number.",
        ),
        Property(
            "knows norms of any order",
            _returns_the_norm(ORDERS),
            "the p-norm of the ranks' p-norms is the whole's; for p = inf that is the maximum.",
        ),
        Property(
            "counts once what all ranks hold",
            _returns_the_norm(COPIES),
            "put the norm of the replicated gradients beside the ranks' norms, once.",
        ),
        Property(
            "serves ranks that have no shard",
            _returns_the_norm(EMPTY),
            "a rank without elements contributes zero, and takes part in the call.",
        ),
        Property(
            "shows all ranks what is not finite on one",
            _returns_the_norm(BAD),
            "nan must come through: gather all ranks' norms and take the norm of them.",
        ),
        Property(
            "scales by max_norm / norm, and never up",
            _scales,
            "as torch: the factor max_norm / (norm + 1e-6), at most 1, in place, on all gradients.",
        ),
        Property(
            "agrees by one small call",
            _agrees_cheaply,
            "one number a rank: all_gather or all_reduce a 0-dim tensor, not gradients.",
        ),
    ),
)
