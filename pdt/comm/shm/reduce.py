"""Sums, extremes and bitwise operations over the tensors of all ranks (pure)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

_Fold = Callable[..., torch.Tensor]
_FOLDS: dict[str, _Fold] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_WIDENED = ("SUM", "AVG", "PREMUL_SUM", "PRODUCT")


@dataclass(frozen=True)
class Op:
    """A torch ReduceOp in plain words: SUM, MIN...; `factor` belongs to PREMUL_SUM."""

    name: str
    factor: float | None = None

    def __str__(self) -> str:
        return self.name if self.factor is None else f"{self.name} {self.factor}"


def reduction_of(opts: Any) -> Op:
    """What `opts` asks for: torch's options, a ReduceOp, or None for the sum."""
    op: Any = getattr(opts, "reduceOp", dist.ReduceOp.SUM if opts is None else opts)
    name = getattr(op, "op", op).name
    return Op(name, float(op.factor) if name == "PREMUL_SUM" else None)


class Reduction:
    """Combines one tensor of each rank, in the order of ranks, so that all get the same bits.

    Sums and products of float16 and bfloat16 are formed in float32 and rounded once. MIN and MAX
    pass NaN on. Raises ValueError for an operation that `dtype` does not have.
    """

    def __init__(self, op: Op, dtype: torch.dtype) -> None:
        self.name, self._factor = op.name, op.factor
        floating = dtype.is_floating_point or dtype.is_complex
        refused = {
            "AVG": not floating,
            "PREMUL_SUM": not floating,
            "MIN": dtype.is_complex,
            "MAX": dtype.is_complex,
        }
        if refused.get(self.name, floating and self.name in ("BAND", "BOR", "BXOR")):
            raise ValueError(f"ReduceOp.{self.name} is not defined for tensors of {dtype}")
        self._fold = _FOLDS[self.name]
        self._wide = dtype in (torch.float16, torch.bfloat16) and self.name in _WIDENED

    @classmethod
    @cache
    def of(cls, op: Op, dtype: torch.dtype) -> "Reduction":
        """The one for `op` and `dtype`, made once."""
        return cls(op, dtype)

    def __call__(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """Write the reduction of `parts`, by rank, to `out`, which overlaps none of them."""
        first = parts[0].float() if self._wide else parts[0]
        total = first if self._wide else out
        if len(parts) == 1:
            total.copy_(first)
        else:
            self._fold(first, parts[1], out=total)
        for part in parts[2:]:
            self._fold(total, part, out=total)
        if self.name == "AVG":
            total.div_(len(parts))
        elif self._factor is not None:
            total.mul_(self._factor)
        if self._wide:
            out.copy_(total)
        return out
