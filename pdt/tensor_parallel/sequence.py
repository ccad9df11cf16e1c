"""Between the split regions: each rank has a part of the sequence, in place of all of it.

Norms, dropouts and residuals work token by token, so nobody needs all tokens there. Then g sums and
leaves each rank its part (a reduce-scatter), and f brings the parts together (an all-gather): as
many bytes as the all-reduce that they replace, and a t-th of the activations. Korthikanti et al.
2022, section 4.2.2 (arXiv:2205.05198), which calls the two g and g-bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pdt.comm.started import start_all_gather, start_reduce_scatter
from pdt.flat import flatten, unflatten
from pdt.tensor_parallel.regions import Group

Wait = Callable[[], Tensor]  # returns the result when it is there


def gather_sequence(x: Tensor, dim: int = 1, group: Group = None) -> Tensor:
    """All ranks' parts one behind the other along `dim`; the gradient is summed, and split."""
    return _Gather.apply(x, dim, group)


def sum_and_split(x: Tensor, dim: int = 1, group: Group = None) -> Tensor:
    """This rank's part along `dim` of the sum of all ranks' `x`; gradients are gathered.

    Raises ValueError where the length of `dim` is no multiple of the number of ranks.
    """
    return _SumAndSplit.apply(x, dim, group)


def own_part(x: Tensor, dim: int = 1, group: Group = None) -> Tensor:
    """This rank's part of what all ranks have alike, along `dim`: the way into such a region."""
    return x.chunk(_parts(x, dim, group), dim)[dist.get_rank(group)]


def start_gather(x: Tensor, dim: int, group: Group) -> Wait:
    """Begin to bring the parts together."""
    n = dist.get_world_size(group)
    parts = x.new_empty(n, *x.shape)
    parts[dist.get_rank(group)] = x.detach()
    work = start_all_gather(parts.view(-1), group)

    def wait() -> Tensor:
        work.wait()
        return torch.cat(parts.unbind(), dim)

    return wait


def start_sum(x: Tensor, dim: int, group: Group) -> Wait:
    """Begin to sum what the ranks have, of which each keeps its part."""
    parts = torch.stack(x.detach().chunk(_parts(x, dim, group), dim))
    mine = torch.empty_like(parts[0])
    work = start_reduce_scatter(mine.view(-1), parts.view(-1), group)

    def wait() -> Tensor:
        work.wait()
        return mine

    return wait


def sequence_column_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, group: Group
) -> Tensor:
    """The product of all tokens with this rank's `weight` (out/t, in); `x` is its part of them.

    The graph keeps the part alone, and backward gathers it again, while it computes.
    """
    return _Column.apply(x, weight, bias, dim, group)


@torch.no_grad()
def sum_partial_grads(params: Iterable[nn.Parameter], group: Group = None) -> None:
    """Sum over the ranks the gradients of parameters that each rank has whole, and that saw its
    part of the tokens alone: of norms, and of the biases of row-parallel layers.

    One collective for all; call it after backward, with the same parameters on all ranks. Raises
    ValueError for one without a gradient.
    """
    named = list(params)
    for i, param in enumerate(named):
        if param.grad is None:
            raise ValueError(f"parameter {i} of shape {tuple(param.shape)} has no gradient to sum")
    grads = [param.grad for param in named if param.grad is not None]
    if not grads:
        return
    flat = flatten(grads)
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, unflatten(flat, grads), strict=True):
        grad.copy_(total)


def _parts(x: Tensor, dim: int, group: Group) -> int:
    n = dist.get_world_size(group)
    if x.shape[dim] % n:
        raise ValueError(
            f"dim {dim} of {tuple(x.shape)} is {x.shape[dim]} long, no multiple of {n} ranks: pad "
            "the sequence"
        )
    return n


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_gather(x, dim, group)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_sum(grad, ctx.dim, ctx.group)(), None, None


class _SumAndSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_sum(x, dim, group)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_gather(grad, ctx.dim, ctx.group)(), None, None


class _Column(torch.autograd.Function):
    """In backward the input is gathered while its gradient is computed, and that is summed while
    the weight's is."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, group: Group
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.group = dim, group
        return F.linear(start_gather(x, dim, group)(), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        coming = start_gather(x, ctx.dim, ctx.group) if wants_weight else None
        summed = start_sum(grad @ weight, ctx.dim, ctx.group) if wants_x else None
        rows = grad.reshape(-1, weight.shape[0])
        grad_weight = None
        if coming is not None:
            grad_weight = rows.t() @ coming().reshape(-1, weight.shape[1])
        grad_bias = rows.sum(0) if wants_bias else None
        return None if summed is None else summed(), grad_weight, grad_bias, None, None
