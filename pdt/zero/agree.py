"""What the ranks agree on before a step: which parameters have a gradient, on any of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def any_rank(
    rows: Sequence[Sequence[bool]], group: dist.ProcessGroup | None, device: torch.device
) -> list[list[bool]]:
    """For each flag: whether it is set on some rank. One all-reduce of a byte a flag."""
    return [[level > 0 for level in row] for row in highest_of_ranks(rows, group, device)]


def highest_of_ranks(
    rows: Sequence[Sequence[int]], group: dist.ProcessGroup | None, device: torch.device
) -> list[list[int]]:
    """For each number from 0 to 255: the highest of all ranks'. One all-reduce of a byte each."""
    levels = torch.tensor(rows, dtype=torch.uint8, device=device)
    dist.all_reduce(levels, op=dist.ReduceOp.MAX, group=group)
    return levels.tolist()
