"""What lesson 04's flat average of gradients must do: several dtypes, missing ones, few calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2}
FLAG_NBYTES = 8  # by which the ranks may agree on a parameter
OVERFLOW = "float16, a sum that overflows"


class Holder(nn.Module):
    """Parameters that some user might have: the first is registered under a second name."""

    def __init__(self, weights: list[Tensor], trainable: list[bool]) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            nn.Parameter(weight, requires_grad=train)
            for weight, train in zip(weights, trainable, strict=True)
        )
        self.tied = self.layers[0]


def _tensors(dice: Dice, dtypes: list[torch.dtype]) -> list[Tensor]:
    """One of each shape; the dtypes take turns."""
    k = dice.integer(2, 6)
    shapes = [(k, 4), (), (3, k), (0,), (k + 7,), (2, 1, k)]
    made = [dice.normal(shape, dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]
    return [made[0].t().contiguous().t(), *made[1:]]  # the first lies transposed in memory


def _trials(dice: Dice) -> Iterator[Trial]:
    f64, f32 = torch.float64, torch.float32
    for n in (1, 2, 3, 4):

        def some(rank: int, i: int, last: int = n - 1) -> bool:
            return i != rank + 1 and (rank < last or i % 2 == 0)

        yield _trial(dice, n, "one dtype", [f64], lambda rank, i: True)
        yield _trial(dice, n, "two dtypes", [f64, f32], lambda rank, i: True)
        yield _trial(dice, n, "gradients missing; the last rank lacks float32", [f64, f32], some)
        yield _trial(dice, n, "two that no rank used", [f64, f32], lambda rank, i: i not in (2, 5))
        large = [torch.full((5,), 6e4, dtype=torch.float16)]
        weights = [dice.normal((5,), torch.float16) for _ in range(n)]
        yield Trial([([weight], large, [True]) for weight in weights], OVERFLOW)


def _trial(
    dice: Dice,
    n: int,
    label: str,
    dtypes: list[torch.dtype],
    has: Callable[[int, int], bool],
) -> Trial:
    """Ranks hold other weights, so that whoever averages those is seen; parameter 4 is frozen."""
    inputs = []
    shape_seed = dice.integer(0, 10**6)
    for rank in range(n):
        weights = _tensors(Dice(shape_seed), dtypes)
        weights = [w + rank for w in weights]
        drawn = [dice.normal(tuple(w.shape), w.dtype) for w in weights]
        grads = [g if has(rank, i) and i != 4 else None for i, g in enumerate(drawn)]
        inputs.append((weights, grads, [i != 4 for i in range(len(weights))]))
    return Trial(inputs, label)


def _drive(
    flat_sync: Callable[..., Any],
    weights: list[Tensor],
    grads: list[Tensor | None],
    trainable: list[bool],
) -> tuple[list, list]:
    """Gradients and weights after the call."""
    model = Holder([w.clone() for w in weights], trainable)
    for param, grad in zip(model.layers, grads, strict=True):
        param.grad = None if grad is None else torch.empty_like(param).copy_(grad)
    flat_sync(model)
    params = list(model.layers)
    return [p.grad for p in params], [p.detach() for p in params]


def _means(run: Run) -> list[Tensor | None]:
    """Of each parameter: the mean over all ranks, None where no rank has a gradient."""
    means: list[Tensor | None] = []
    for i in range(len(run.inputs[0][0])):
        present = [grads[i] for _, grads, _ in run.inputs if grads[i] is not None]
        total = sum(grad.double() for grad in present) / run.world_size if present else None
        means.append(None if total is None else total.to(present[0].dtype))
    return means


def _is_the_mean(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        for i, (grad, mean) in enumerate(zip(seen.result[0], _means(run), strict=True)):
            if mean is not None:
                near = TOLERANCE[mean.dtype]
                what = f"the gradient of parameter {i} on rank {rank}"
                expect_tensor(grad, mean, what, rtol=near, atol=near)


def _only(label: str, check: Callable[[Run], None], wanted: bool) -> Callable[[Run], None]:
    """The check, on trials of this label alone or on all the others."""
    return lambda run: check(run) if (run.trial.label == label) is wanted else None


def _stays_none(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        for i, (grad, mean) in enumerate(zip(seen.result[0], _means(run), strict=True)):
            if mean is None:
                what = f"None for parameter {i}, which no rank used"
                expect(grad is None, what, f"a gradient on rank {rank}")


def _trained(run: Run) -> list[Tensor]:
    weights, _, trainable = run.inputs[0]
    return [w for w, train in zip(weights, trainable, strict=True) if train]


def _few_calls(run: Run) -> None:
    dtypes = len({weight.dtype for weight in _trained(run)})
    for rank, seen in enumerate(run.ranks):
        ops = [record.op for record in seen.records]
        what = f"at most {dtypes} all-reduces on rank {rank} and one for what is missing"
        fine = len(ops) <= dtypes + 1 and set(ops) <= {"all_reduce"}
        expect(fine, what, f"{len(ops)} calls: {', '.join(ops[:4])}{' ...' * (len(ops) > 4)}")


def _each_once(run: Run) -> None:
    params = _trained(run)
    allowed = sum(p.nbytes for p in params) + FLAG_NBYTES * len(params)
    for rank, seen in enumerate(run.ranks):
        nbytes = sum(record.nbytes for record in seen.records)
        expect(nbytes <= allowed, f"at most {allowed:,} bytes reduced on rank {rank}", nbytes)


def _weights_stay(run: Run) -> None:
    for rank, (seen, given) in enumerate(zip(run.ranks, run.inputs, strict=True)):
        for i, (after, before) in enumerate(zip(seen.result[1], given[0], strict=True)):
            expect_tensor(after, before, f"weight {i} of rank {rank}")


FLAT_SYNC = Exercise(
    name="flat_sync",
    points=3,
    minutes=25,
    trials=_trials,
    drive=_drive,
    poison=("pdt.strategies.average_gradients",),
    properties=(
        Property(
            "leaves the mean of all ranks' gradients",
            _only(OVERFLOW, _is_the_mean, wanted=False),
            "a rank without a gradient counts as zero, and the sum is divided by the world size.",
        ),
        Property(
            "divides before it adds",
            _only(OVERFLOW, _is_the_mean, wanted=True),
            "6e4 + 6e4 is more than float16 can hold: divide the flat tensor, then all-reduce it.",
        ),
        Property(
            "leaves None where no rank has a gradient",
            _stays_none,
            "let the ranks add up who has which gradient, by one small all-reduce before.",
        ),
        Property(
            "makes one all-reduce for each dtype",
            _few_calls,
            "group the trainable parameters (not the gradients) by dtype, and flatten each group.",
        ),
        Property(
            "sends each gradient once, in its dtype",
            _each_once,
            "model.parameters() yields a tied parameter once; do not cast one dtype to another.",
        ),
        Property(
            "leaves the weights as they were",
            _weights_stay,
            "average the gradients; the optimizer moves the weights.",
        ),
    ),
)
