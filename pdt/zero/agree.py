"""What the ranks agree on before a step: which parameters have a gradient, on any of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def any_rank(
    rows: Sequence[Sequence[bool]], group: dist.ProcessGroup | None, device: torch.device
) -> list[list[bool]]:
    """For each flag: whether it is set on some rank. One all-reduce of a byte a flag."""
    flags = torch.tensor(rows, dtype=torch.uint8, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return flags.bool().tolist()
