"""Gradients that several ranks have a part of: tied weights in two stages, replicas of a stage."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from pdt.comm.messages import Group


def sum_tied_gradients(params: Iterable[Tensor], group: Group = None) -> None:
    """Every rank of `group` holds the sum of its members' gradients, so copies of a tied weight
    that began alike stay alike.

    Call it after the step, on each rank that has a copy; a rank without a gradient counts as zero.
    Such a group has the first and the last rank of the pipeline. Two copies on one rank are better
    one parameter.
    """
    for param in params:
        _reduce(param, group, 1.0)


def average_gradients(params: Iterable[Tensor], group: Group = None) -> None:
    """Every rank of `group`, the replicas of one stage, holds the mean of their gradients.

    Call it after the step, once. A rank without a gradient counts as zero; frozen parameters are
    left alone.
    """
    for param in params:
        _reduce(param, group, 1 / dist.get_world_size(group))


@torch.no_grad()
def _reduce(param: Tensor, group: Group, scale: float) -> None:
    if not param.requires_grad:
        return
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    dist.all_reduce(param.grad.mul_(scale), group=group)
