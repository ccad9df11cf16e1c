"""What makes the ranks' models equal: one exchange that compares them, and rank 0's values."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pdt.buckets import assign_buckets
from pdt.flat import flatten, unflatten

PIECE_MB = 25.0  # of one broadcast


def describe(module: nn.Module) -> list[str]:
    """One line per parameter and buffer: what must be the same on every rank."""
    return [
        *(
            describe_tensor("parameter", n, p)
            for n, p in module.named_parameters(remove_duplicate=False)
        ),
        *(describe_tensor("buffer", n, b) for n, b in module.named_buffers(remove_duplicate=False)),
    ]


def describe_tensor(kind: str, name: str, tensor: Tensor) -> str:
    """One line: `parameter fc.weight (2, 3) float32, strides (3, 1), requires_grad`."""
    if is_lazy(tensor):
        return f"{kind} {name} without a shape"
    dtype = str(tensor.dtype).removeprefix("torch.")
    grad = ", requires_grad" if tensor.requires_grad else ""
    return f"{kind} {name} {tuple(tensor.shape)} {dtype}, strides {tensor.stride()}{grad}"


def check_same(lines: Sequence[str], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raises the same ValueError on every rank unless all pass the same lines.

    One all-gather of 32 bytes, a digest of the lines; only when the digests differ are the lines
    themselves exchanged, to say who holds what.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    own = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    digests = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, own, group=group)
    if all(torch.equal(other, own) for other in digests):
        return
    held: list[Any] = [None] * len(digests)
    dist.all_gather_object(held, list(lines), group=group)
    raise ValueError(f"every rank must hold the same model, but {_first_difference(held)}")


def _first_difference(held: Sequence[Sequence[str]]) -> str:
    """The first line in which the ranks differ, as each holds it."""
    for i in range(max(map(len, held))):
        lines = [lines[i] if i < len(lines) else "nothing more" for lines in held]
        if len(set(lines)) > 1:
            return "; ".join(f"rank {rank} holds {line}" for rank, line in enumerate(lines))
    raise AssertionError("equal lines have equal digests")


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup | None, source: int = 0) -> None:
    """Every rank holds group rank `source`'s values afterwards.

    One broadcast for each dtype and device and about 25 MiB, as bytes, so that any dtype travels.
    Autograd's version counters stay as they are: a graph that saved one of these tensors (a buffer
    that is sent again before backward) remains valid.
    """
    if not tensors:
        return
    root = source if group is None else dist.get_global_rank(group, source)
    receives = dist.get_rank(group) != source
    plan = assign_buckets(tensors, bucket_cap_mb=PIECE_MB, first_bucket_mb=PIECE_MB)
    for bucket in plan:
        if bucket.numel == 0:
            continue
        parts = [tensors[i].data for i in bucket.params]
        flat = flatten(parts)
        dist.broadcast(flat.view(torch.uint8), src=root, group=group)
        if receives:
            for part, sent in zip(parts, unflatten(flat, parts), strict=True):
                part.copy_(sent)
