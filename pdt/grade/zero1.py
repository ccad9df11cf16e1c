"""What lesson 09's exercises must do: shard the states, clip by the whole norm, save whole tensors.

Here the first one; `clip_sharded` and `logical_states` hold the others.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pdt.grade.clip_sharded import CLIP_SHARDED
from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_sent, expect_tensor
from pdt.grade.logical_states import LOGICAL_STATES
from pdt.measure.memory import Ledger

STEPS = 3
EVEN, UNEVEN, FEW, GROUPS = "even", "uneven", "fewer elements than ranks", "two groups"
CLASSES = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
SETTINGS = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 0.1, "weight_decay": 0.2}}
OF_GROUP = ({"weight_decay": 0.5}, {"weight_decay": 0.0, "lr": 0.03})
NUM_STATES = {"SGD": 1, "AdamW": 2}
SMALL_NBYTES = 512  # step counts, padding, and a few bytes to agree on something


def _trials(dice: Dice) -> Iterator[Trial]:
    """Sizes that divide and that do not, two groups with settings of their own."""
    for n in (1, 2, 3, 4):
        for label in (EVEN, UNEVEN, FEW, GROUPS):
            groups = _shapes(dice, n, label)
            optimizer = "SGD" if n % 2 else "AdamW"
            start = [[dice.normal(shape, torch.float64) for shape in group] for group in groups]
            by_rank = [_grads(dice, groups) for _ in range(n)]
            yield Trial([(start, grads, optimizer) for grads in by_rank], f"{label}, {optimizer}")


def _shapes(dice: Dice, n: int, label: str) -> list[list[tuple[int, ...]]]:
    """Of the parameters, by group."""
    rows, width = 12 * dice.integer(2, 5), dice.integer(20, 40)
    if label == EVEN:
        return [[(rows, width), (12,), (24, 5)]]
    if label == FEW:
        return [[(max(1, n - 1),)]]
    uneven: list[tuple[int, ...]] = [(rows, width), (7,), (), (12, 12)]
    uneven.append((1 + n - sum(torch.Size(shape).numel() for shape in uneven) % n,))
    return [uneven, [(5, 5), (dice.integer(3, 9),)]] if label == GROUPS else [uneven]


def _grads(dice: Dice, groups: list[list[tuple[int, ...]]]) -> list[list[list[Tensor]]]:
    """By step, group and parameter."""
    return [
        [[dice.normal(shape, torch.float64) for shape in group] for group in groups]
        for _ in range(STEPS)
    ]


def _watched(base: type, made: list) -> type:
    """The optimizer class, which notes what is made of it."""

    class Watched(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    return Watched


def _groups(start: list[list[Tensor]]) -> list[dict[str, Any]]:
    settings = OF_GROUP if len(start) > 1 else ({},)
    return [
        {"params": [nn.Parameter(value.clone()) for value in values], **of_group}
        for values, of_group in zip(start, settings, strict=True)
    ]


def _drive(
    PartitionedOptimizer: Callable[..., Any],
    start: list[list[Tensor]],
    grads: list[list[list[Tensor]]],
    optimizer: str,
) -> dict[str, Any]:
    """Steps, then: the parameters, the states' elements, and bytes that were not there before."""
    made: list[torch.optim.Optimizer] = []
    chosen = _watched(CLASSES[optimizer], made)
    with Ledger() as ledger:
        groups = _groups(start)
        params = [p for group in groups for p in group["params"]]
        given = [[g.clone() for group in step for g in group] for step in grads]
        before = sum(ledger.live().values())
        stepper = PartitionedOptimizer(groups, chosen, **SETTINGS[optimizer])
        for step in given:
            for param, grad in zip(params, step, strict=True):
                param.grad = grad
            stepper.step()
        for param in params:
            param.grad = None
        gc.collect()
        held = sum(ledger.live().values()) - before
    items = [item for o in made for state in o.state.values() for item in state.items()]
    states = sum(v.numel() for name, v in items if isinstance(v, Tensor) and name != "step")
    return {"params": [p.detach() for p in params], "states": states, "held": held}


def _one_for_all(run: Run) -> list[Tensor]:
    """The parameters after the same steps of one optimizer, with the means of the gradients."""
    start, grads, optimizer = run.inputs[0]
    groups = _groups(start)
    stepper = CLASSES[optimizer](groups, **SETTINGS[optimizer])
    for step in range(len(grads)):
        for g, group in enumerate(groups):
            for i, param in enumerate(group["params"]):
                of_ranks = [given[step][g][i] for _, given, _ in run.inputs]
                param.grad = torch.stack(of_ranks).mean(0)
        stepper.step()
    return [p.detach() for group in groups for p in group["params"]]


def _updates(*labels: str) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        if run.trial.label.split(", ")[0] not in labels:
            return
        wanted = _one_for_all(run)
        for rank, seen in enumerate(run.ranks):
            for i, (value, right) in enumerate(zip(seen.result["params"], wanted, strict=True)):
                what = f"rank {rank}'s parameter {i} after {STEPS} steps"
                expect_tensor(value, right, what, rtol=0, atol=1e-10)

    return check


def _shard_numel(run: Run) -> int:
    """Elements of a rank's shards, one a group."""
    start, n = run.inputs[0][0], run.world_size
    return sum(-(-sum(t.numel() for t in group) // n) for group in start)


def _holds_a_shard(run: Run) -> None:
    optimizer = run.inputs[0][2]
    most = NUM_STATES[optimizer] * _shard_numel(run)
    every = NUM_STATES[optimizer] * sum(t.numel() for group in run.inputs[0][0] for t in group)
    for rank, seen in enumerate(run.ranks):
        states, held = seen.result["states"], seen.result["held"]
        expect(states <= most, f"states of {most:,} elements at most on rank {rank}", f"{states:,}")
        allowed = 8 * (most + 2 * _shard_numel(run)) + SMALL_NBYTES
        what = f"{allowed:,} bytes at most on rank {rank} beside parameters and gradients"
        expect(held <= allowed, what, f"{held:,}")
    all_states = sum(seen.result["states"] for seen in run.ranks)
    what = f"the optimizer class that is given holds {every:,} elements on all ranks together"
    expect(all_states >= every, what, f"{all_states:,}")


def _sends_two_parts(run: Run) -> None:
    n = run.world_size
    most = STEPS * (2 * (n - 1) * 8 * _shard_numel(run) + SMALL_NBYTES) if n > 1 else 0
    expect_sent(run, [0] * n, [most] * n)


PARTITIONED_OPTIMIZER = Exercise(
    name="PartitionedOptimizer",
    points=3,
    minutes=25,
    trials=_trials,
    drive=_drive,
    poison=(
        "pdt.zero.sharded.ShardedOptimizer",
        "pdt.zero.bucket.ShardedBucket",
    ),
    properties=(
        Property(
            "updates as one optimizer for all would",
            _updates(EVEN),
            "divide the sum of a shard's gradients by n, update, and gather into the parameters.",
        ),
        Property(
            "takes any number of elements",
            _updates(UNEVEN, FEW),
            "pad the flat buffer with zeros to n equal shards (ShardLayout.padded_numel).",
        ),
        Property(
            "gives each group its own settings",
            _updates(GROUPS),
            "make one flat buffer a group, and give the optimizer a group with its shard.",
        ),
        Property(
            "holds the states of its shard, and nothing else whole",
            _holds_a_shard,
            "the optimizer sees the shard alone; what a step gathers or reduces ends with it.",
        ),
        Property(
            "sends 2(n-1)/n of the parameters in a step",
            _sends_two_parts,
            "a reduce-scatter of the gradients and an all-gather of the parameters are enough.",
        ),
    ),
)

EXERCISES = (PARTITIONED_OPTIMIZER, CLIP_SHARDED, LOGICAL_STATES)
