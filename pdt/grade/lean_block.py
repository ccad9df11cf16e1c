"""Lesson 01's exercise on activations: a layer that is not the paper's, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect_int
from pdt.measure.saved import saved_activations
from pdt.model.gpt import Dropout


class LeanBlock(nn.Module):
    """A layer with ReLU in place of GELU, and with dropout after its two projections alone."""

    def __init__(self, h: int, a: int) -> None:
        super().__init__()
        self.a = a
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        self.dropout = Dropout(0.1)  # masks of one byte

    def attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(2, (3, self.a, -1))  # (b, s, 3, a, h/a)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (b, a, s, h/a) each
        scores = q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5  # (b, a, s, s)
        y = scores.softmax(dim=-1) @ v  # (b, a, s, h/a)
        return self.proj(y.transpose(1, 2).flatten(2))  # (b, s, h)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(self.up(self.norm_2(x)).relu()))  # (b, s, h)


DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def _layers(dice: Dice) -> Iterator[Trial]:
    for element_nbytes in DTYPES:
        for _ in range(3):
            a = dice.integer(2, 5)
            s, b, h = dice.integer(9, 40), dice.integer(2, 4), a * dice.integer(3, 9)
            label = f"s={s}, b={b}, h={h}, a={a}, element_nbytes={element_nbytes}"
            yield Trial([(s, b, h, a, element_nbytes)], label)


def _counts(*sizes: int) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        s, b, h, a, element_nbytes = run.inputs[0]
        if element_nbytes in sizes:
            dtype = DTYPES[element_nbytes]
            x = torch.ones(b, s, h, dtype=dtype, requires_grad=True)
            kept = saved_activations(LeanBlock(h, a).to(dtype), x)
            expect_int(run.ranks[0].result, sum(tensor.nbytes for tensor in kept))

    return check


LEAN_BLOCK_NBYTES = Exercise(
    name="lean_block_nbytes",
    points=2,
    minutes=20,
    trials=_layers,
    poison=(
        "pdt.measure.saved.saved_activations",
        "pdt.measure.saved.SavedActivations",
        "pdt.plan.formulas.activation_nbytes",
    ),
    properties=(
        Property(
            "is exact at two bytes an element",
            _counts(2),
            "list what saved_activations finds in a small LeanBlock, and name every line.",
        ),
        Property(
            "is exact at four and eight bytes an element",
            _counts(4, 8),
            "which of the kept tensors are masks? They take one byte whatever the dtype.",
        ),
    ),
)
