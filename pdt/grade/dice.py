"""Hidden inputs: random, and yet the same again for the same seed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TypeVar

import torch

T = TypeVar("T")
LARGEST = 8  # sums over a few ranks stay exact integers in every dtype, bf16 included


class Dice:
    """One exercise's source of chance; nothing of torch's global generator is used or changed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generator = torch.Generator().manual_seed(seed)

    @classmethod
    def fresh(cls) -> Dice:
        """A seed that nobody can know before."""
        return cls(secrets.randbits(31))

    def integer(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return int(torch.randint(low, high + 1, (), generator=self._generator))

    def choice(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.integer(0, len(items) - 1)]

    def integers(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, largest: int = LARGEST
    ) -> torch.Tensor:
        """Whole numbers from -largest to largest: sums are exact, in whatever order."""
        values = torch.randint(-largest, largest + 1, tuple(shape), generator=self._generator)
        return values.to(dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normally distributed values, drawn in float64."""
        drawn = torch.randn(tuple(shape), generator=self._generator, dtype=torch.float64)
        return drawn.to(dtype)
