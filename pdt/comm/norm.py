"""The norm of what is spread over ranks, and the factor that clips it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def norm_over_ranks(
    shards: Sequence[Tensor],
    norm_type: float,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device,
    whole: Sequence[Tensor] = (),
) -> Tensor:
    """The norm of all ranks' `shards`, and of `whole`, which every rank holds alike: the same
    0-dim tensor on every rank. A rank may have none.

    In fp32, or in fp64 where a tensor is. One all-gather of one number a rank, so that a nan or an
    infinity on one rank is seen on all.
    """
    dtype = _dtype([*shards, *whole])
    own = _norm(shards, norm_type, dtype, device)
    everybody = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, own, group=group)
    norms = [*everybody, _norm(whole, norm_type, dtype, device)] if whole else everybody
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def clip_over_ranks(
    shards: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device,
    whole: Sequence[Tensor] = (),
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales `shards` and `whole` as torch's `clip_grad_norm_` does; returns their norm before.

    RuntimeError for a norm that is not finite, if asked: on every rank, since all hold the same.
    """
    norm = norm_over_ranks(shards, norm_type, group, device=device, whole=whole)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {norm.item()}: skip this step on all "
            "ranks (zero_grad), or pass error_if_nonfinite=False"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for tensor in (*shards, *whole):
        tensor.mul_(factor.to(tensor.device))
    return norm


def norm_of(tensors: Sequence[Tensor], norm_type: float, *, device: torch.device) -> Tensor:
    """The norm of all elements together, 0-dim; in fp32, or in fp64 where a tensor is."""
    return _norm(tensors, norm_type, _dtype(tensors), device)


def _dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    is_double = any(t.dtype in (torch.float64, torch.complex128) for t in tensors)
    return torch.float64 if is_double else torch.float32


def _norm(
    tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    norms = [
        torch.linalg.vector_norm(t, norm_type).to(device, dtype)
        if t.dtype in (torch.float32, torch.float64) or t.is_complex()
        else torch.linalg.vector_norm(t, norm_type, dtype=dtype).to(device)
        for t in tensors
        if t.numel()
    ]
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)
