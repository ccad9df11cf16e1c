"""Into the part of a model that is split over ranks, and out of it: Megatron's f and g.

In a *split region* each rank computes with its slice of the weights, on inputs that all ranks have
alike. f leads in: it changes nothing in forward, and in backward sums the gradients that the ranks
have of their common input. g leads out: it sums what the ranks have computed in forward, and
changes nothing in backward. Shoeybi et al. 2019, section 3 (arXiv:1909.08053).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Group = dist.ProcessGroup | None


def copy_to_ranks(x: Tensor, group: Group = None) -> Tensor:
    """f: `x`, which all ranks have alike; its gradient is the sum of theirs, on every rank."""
    return _Copy.apply(x, group)


def sum_over_ranks(x: Tensor, group: Group = None) -> Tensor:
    """g: the sum of all ranks' `x`, on every rank, in place of `x`; its gradient is what comes."""
    return _Sum.apply(x, group)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()  # it may be somebody else's too
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
