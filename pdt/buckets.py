"""Which gradients travel together: the plan of DDP's buckets.

Pure: no process group, no storage. Li et al. 2020, sections 3.2.3 and 4.2 (arXiv:2006.15704): a
backward pass makes gradients from the last layer to the first, so the buckets follow the reverse
order of registration; each is sent when it is full, while the rest are still computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdt.flat import offsets

MiB = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients lie in one flat buffer, in this order.

    `params` are positions in the list that was assigned; `offsets` are where each begins, in
    elements, with the end of the last one behind them.
    """

    index: int
    dtype: torch.dtype
    device: torch.device
    params: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.offsets[-1]

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def assign_buckets(
    params: Sequence[Tensor],
    *,
    bucket_cap_mb: float = 25.0,
    first_bucket_mb: float = 1.0,
    order: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
) -> list[Bucket]:
    """Buckets over `params`, in the order in which they are to be sent.

    A bucket holds one dtype and device. It takes parameters until it has reached its cap (so it may
    end above it by less than its last parameter): `first_bucket_mb` for the first of each dtype and
    device, `bucket_cap_mb` for the others, both in MiB. Buckets are sorted by the first parameter
    they took. A cap of 0 gives each parameter a bucket of its own.

    `order` is the order in which gradients become ready, as positions in `params`; by default the
    reverse of registration. `dtypes` are those of the gradients where they are not the parameters'.
    A parameter that is in the list twice (a tied one) is taken once, at its first position: its
    gradient is complete only when backward has reached its first use. Raises ValueError for a
    negative cap and for an order that is not one of these parameters.
    """
    for name, cap in (("bucket_cap_mb", bucket_cap_mb), ("first_bucket_mb", first_bucket_mb)):
        if not cap >= 0:
            raise ValueError(f"{name} must be 0 or more MiB, got {cap}")
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}  # bytes in the open bucket
    caps: dict[tuple[torch.dtype, torch.device], float] = {}  # of the open bucket
    groups: list[list[int]] = []
    for position in _order(params, order):
        dtype = dtypes[position] if dtypes else params[position].dtype
        key = dtype, params[position].device
        if key not in open_buckets:
            groups.append(open_buckets.setdefault(key, []))
            filled[key] = 0
        open_buckets[key].append(position)
        filled[key] += params[position].numel() * dtype.itemsize
        if filled[key] >= caps.get(key, first_bucket_mb) * MiB:
            caps[key] = bucket_cap_mb
            del open_buckets[key]
    return [_bucket(i, group, params, dtypes) for i, group in enumerate(groups)]


def names_of(group: Mapping[str, Any], group_index: int) -> list[str]:
    """Of an optimizer's parameters, as far as it was given names, or where each is in the list."""
    positions = range(len(group["params"]))
    return group.get("param_names") or [f"parameter {i} of group {group_index}" for i in positions]


def _order(params: Sequence[Tensor], order: Sequence[int] | None) -> list[int]:
    """`order`, or the reverse of registration, with each tensor once."""
    first_position: dict[int, int] = {}
    for position, param in enumerate(params):
        first_position.setdefault(id(param), position)
    distinct = sorted(first_position.values())
    if order is None:
        return distinct[::-1]
    if sorted(order) != distinct:
        raise ValueError(
            f"order must name each of the {len(distinct)} distinct parameters once by its first "
            f"position, got {list(order)}"
        )
    return list(order)


def _bucket(
    index: int, group: list[int], params: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None
) -> Bucket:
    first = params[group[0]]
    dtype = dtypes[group[0]] if dtypes else first.dtype
    ends = offsets(params[i].numel() for i in group)
    return Bucket(index, dtype, first.device, tuple(group), tuple(ends))
