"""What lesson 11's unit must do: gather its parameters, use them, free them, on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pdt.flat import ShardLayout
from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_tensor
from pdt.grade.mixer import LR, Mixer, train_shards

STEPS, ITEM_NBYTES = 2, 8


def _trials(dice: Dice) -> Iterator[Trial]:
    """Units of which a few sizes differ, another batch on each rank, two steps."""
    for n in (1, 2, 3, 4):
        width, seed = dice.integer(30, 40), dice.integer(0, 10**6)
        inputs = []
        for _ in range(n):
            inputs.append((width, seed, 6, dice.normal((STEPS, 1, width), torch.float64)))
        yield Trial(inputs, f"6 units of width {width}")


def _layout(run: Run) -> ShardLayout:
    width = run.inputs[0][0]
    return ShardLayout((width * width, width * width, width), run.world_size)


def _flat(tensors: Iterable[Tensor], layout: ShardLayout) -> Tensor:
    flat = torch.zeros(layout.padded_numel, dtype=torch.float64)
    flat[: layout.offsets[-1]] = torch.cat([t.detach().flatten() for t in tensors])
    return flat


def _told(values: list | None) -> Tensor | None:
    """A rank's list as a tensor again."""
    return None if values is None else torch.tensor(values, dtype=torch.float64)


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _reference(run: Run) -> list[dict[str, Any]]:
    """One process: by step, the outputs and inputs' gradients by rank, each unit's flat mean."""
    width, seed, count, _ = run.inputs[0]
    units = [Mixer(width, seed + i, lambda moment: None) for i in range(count)]
    model, n, found = nn.Sequential(*units), run.world_size, []
    for step in range(STEPS):
        model.zero_grad()
        xs = [inputs[3][step].clone().requires_grad_() for inputs in run.inputs]
        ys = [model(x) for x in xs]
        torch.stack([y.sum() for y in ys]).sum().div(n).backward()
        grads = [[_grad(p).clone() for p in unit.parameters()] for unit in units]
        found.append({"y": ys, "x": [n * _grad(x) for x in xs], "grads": grads})
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(LR * _grad(param))
    return found


def _is_a_shard(run: Run) -> None:
    """The shards are slices of the flat parameters, padded by zeros."""
    width, seed, count, _ = run.inputs[0]
    layout = _layout(run)
    for rank, seen in enumerate(run.ranks):
        for i in range(count):
            params = list(Mixer(width, seed + i, lambda moment: None).parameters())
            wanted = _flat(params, layout).chunk(run.world_size)[rank]
            expect_tensor(
                _told(seen.result["first"][i]), wanted, f"rank {rank}'s shard of unit {i}"
            )


def _computes(run: Run) -> None:
    for step, wanted in enumerate(_reference(run)):
        for rank, seen in enumerate(run.ranks):
            for name, what in (("y", "output"), ("x", "gradient of the input")):
                value = _told(seen.result["steps"][step][name])
                text = f"rank {rank}'s {what} in step {step}"
                expect_tensor(value, wanted[name][rank].detach(), text, rtol=1e-9, atol=1e-12)


def _leaves_the_mean(run: Run) -> None:
    layout = _layout(run)
    for step, wanted in enumerate(_reference(run)):
        for rank, seen in enumerate(run.ranks):
            for i, grad in enumerate(seen.result["steps"][step]["grads"]):
                mean = _flat(wanted["grads"][i], layout).chunk(run.world_size)[rank]
                what = f"the gradient of rank {rank}'s shard of unit {i} in step {step}"
                expect_tensor(_told(grad), mean, what, rtol=1e-9, atol=1e-12)


def _nbytes(run: Run) -> tuple[int, int]:
    """Of all shards together, and of one unit when it is whole."""
    layout = _layout(run)
    return (
        run.inputs[0][2] * layout.shard_numel * ITEM_NBYTES,
        layout.padded_numel * ITEM_NBYTES,
    )


def _holds(run: Run, moments: dict[str, float]) -> None:
    if run.world_size == 1:
        return
    for rank, seen in enumerate(run.ranks):
        for moment, nbytes in seen.result["held"]:
            if moment in moments:
                what = f"{nbytes:,} bytes on rank {rank}"
                text = f"at most {moments[moment]:,.0f} bytes {TEXTS[moment]}"
                expect(nbytes <= moments[moment], text, what)


TEXTS = {
    "built": "before the first forward",
    "between": "between forward and backward",
    "after": "after backward",
    "end": "after the step",
    "forward": "while a unit runs forward",
    "backward": "while a unit runs backward",
}


def _holds_shards(run: Run) -> None:
    """Shards, the shards' gradients after backward, and half a unit for what a batch needs."""
    shards, unit = _nbytes(run)
    rest = dict.fromkeys(("built", "between", "end"), shards + unit / 2)
    _holds(run, rest | {"after": 2 * shards + unit / 2})


def _one_at_a_time(run: Run) -> None:
    """In backward also the unit's gradients, and what a reduction under way needs."""
    shards, unit = _nbytes(run)
    _holds(run, {"forward": shards + 1.5 * unit, "backward": 2 * shards + 4.5 * unit})


def _sends(run: Run) -> None:
    n, (_, unit) = run.world_size, _nbytes(run)
    wanted = round(3 * (n - 1) / n * unit) * run.inputs[0][2]
    for rank, seen in enumerate(run.ranks):
        for step in seen.result["steps"]:
            what = f"{step['sent']:,.0f} by rank {rank}"
            expect(round(step["sent"]) == wanted, f"{wanted:,} bytes sent in a step", what)


SHARD_UNIT = Exercise(
    name="shard_unit",
    points=4,
    minutes=30,
    trials=_trials,
    drive=train_shards,
    poison=("pdt.zero.zero3.fully_shard",),
    properties=(
        Property(
            "returns this rank's slice of the parameters",
            _is_a_shard,
            "lay the parameters one behind the other, pad with zeros to n equal slices, and give "
            "rank r slice r.",
        ),
        Property(
            "computes what one process computes",
            _computes,
            "gather before the forward and again before the backward, from the shards as they are "
            "now.",
        ),
        Property(
            "leaves the mean gradient of its slice in the shard's .grad",
            _leaves_the_mean,
            "reduce-scatter the unit's flat gradient when its last parameter has one, and divide "
            "by n.",
        ),
        Property(
            "holds 1/n between uses",
            _holds_shards,
            "untyped_storage().resize_(0) frees the memory under all views, also those that "
            "autograd has saved; set p.grad to None when it has been reduced.",
        ),
        Property(
            "has one unit whole at a time",
            _one_at_a_time,
            "free the unit in its forward hook and when its gradients have been reduced.",
        ),
        Property(
            "sends 3(n-1)/n of the parameters in a step",
            _sends,
            "two all-gathers and one reduce-scatter for each unit; an all-reduce sends twice as "
            "much.",
        ),
    ),
)
