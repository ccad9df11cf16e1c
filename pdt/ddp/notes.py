"""What ranks tell each other of the first backward: which gradients came, in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

IDLE = -1  # told by a rank that has no batches left


@dataclass(frozen=True)
class Notes:
    """`order`: the parameters in the order in which they became ready on the first rank that had a
    batch, then those without a gradient there. `missing`: by rank, those without a gradient."""

    order: list[int]
    missing: dict[int, list[int]]


def exchange_notes(
    last: Sequence[int], group: dist.ProcessGroup | None, device: torch.device
) -> Notes:
    """Every rank holds the same notes afterwards, by one all-gather of 8 bytes a parameter.

    `last[i]` is the place of parameter i's last gradient in this rank's order, from 1 on; 0 if it
    had none, or IDLE.
    """
    own = torch.tensor(last, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return read_notes([part.tolist() for part in gathered])


def read_notes(table: Sequence[Sequence[int]]) -> Notes:
    """The notes of a table with one row per rank (pure)."""
    busy = [row for row in table if IDLE not in row]
    row = busy[0] if busy else [0] * len(table[0])
    order = sorted(range(len(row)), key=lambda i: (row[i] or len(row) + 1, -i))
    missing = {r: [i for i, place in enumerate(row) if place == 0] for r, row in enumerate(table)}
    return Notes(order, {rank: indices for rank, indices in missing.items() if indices})


def missing_text(missing: Mapping[int, Sequence[str]]) -> str:
    """The error of parameters that got no gradient, by rank."""
    held = "; ".join(f"rank {rank}: {_few(names)}" for rank, names in missing.items())
    return (
        f"parameters got no gradient in this backward ({held}), so the ranks' gradients cannot be "
        "averaged as they come: use every parameter in the loss, freeze it (requires_grad=False) "
        "before wrapping, or pass find_unused_parameters=True"
    )


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
