"""Linear layers of which each rank holds a slice: of the columns of Y, or of those of X.

Y = X A is cut two ways (Shoeybi et al. 2019, section 3, arXiv:1909.08053; A is `weight.T`). By the
columns of A, each rank computes some of Y's features from all of X, and nobody communicates. By
its rows, each rank has some of X's features and a term of all of Y, and the terms are summed. So a
pair, first by columns, then by rows, sums once in forward; and once in backward, the gradients of
X.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pdt.comm.schedule import shard_numel
from pdt.tensor_parallel.regions import Group, sum_over_ranks
from pdt.tensor_parallel.sequence import sequence_column_parallel, sum_and_split


def own_slice(numel: int, group: Group = None, *, multiple_of: int = 1) -> slice:
    """This rank's part of `numel` features (see `part_of`)."""
    return part_of(numel, dist.get_rank(group), dist.get_world_size(group), multiple_of=multiple_of)


def part_of(numel: int, rank: int, n: int, *, multiple_of: int = 1) -> slice:
    """Of `numel` features the part of `rank`, in whole multiples; the first ranks have one more.

    Raises ValueError where `numel` is no such multiple, or where a rank would have nothing.
    """
    count, rest = divmod(numel, multiple_of)
    if rest or count < n:
        raise ValueError(
            f"{numel} features in multiples of {multiple_of} cannot be divided among {n} ranks: "
            f"there are {count} of them and {rest} features left over"
        )
    ends = [sum(shard_numel(count, r, n) for r in range(k)) * multiple_of for k in (rank, rank + 1)]
    return slice(*ends)


class ColumnParallelLinear(nn.Module):
    """Of `linear`, which all ranks have alike, this rank's output features.

    The input (..., in_features) is the same on all ranks, the output (..., out_features/t) this
    rank's part. `weight` is (out_features/t, in_features), `bias` (out_features/t,). In backward
    the gradient of the input is summed over the ranks, while that of the weight is computed: a
    collective of the input's size. `multiple_of` features stay together, such as those of a head.
    With `sequence_dim`, the input is this rank's part of the tokens along it (see `sequence`).
    """

    def __init__(
        self,
        linear: nn.Linear,
        *,
        group: Group = None,
        multiple_of: int = 1,
        sequence_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.group = group
        self.features = own_slice(linear.out_features, group, multiple_of=multiple_of)
        self.weight = own_param(linear.weight, linear.weight.detach()[self.features])
        self.bias = None
        if linear.bias is not None:
            self.bias = own_param(linear.bias, linear.bias.detach()[self.features])

    def forward(self, x: Tensor) -> Tensor:
        return column_parallel(x, self.weight, self.bias, self.sequence_dim, self.group)

    def extra_repr(self) -> str:
        return _described(self)


class RowParallelLinear(nn.Module):
    """Of `linear`, which all ranks have alike, what belongs to this rank's input features.

    The input (..., in_features/t) is this rank's part, as `ColumnParallelLinear` gives it, the
    output (..., out_features) the same on all ranks: a sum over them, a collective of its size.
    `weight` is (out_features, in_features/t); `bias` (out_features,) is on every rank, added once,
    after the sum, and its gradient is whole on every rank. With `sequence_dim`, the output is this
    rank's part of the tokens along it, and the bias's gradient a term (see `sum_partial_grads`).
    Raises ValueError for an input that is not this rank's part.
    """

    def __init__(
        self,
        linear: nn.Linear,
        *,
        group: Group = None,
        multiple_of: int = 1,
        sequence_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.group = group
        self.features = own_slice(linear.in_features, group, multiple_of=multiple_of)
        self.weight = own_param(linear.weight, linear.weight.detach()[:, self.features])
        self.bias = None if linear.bias is None else own_param(linear.bias, linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        own = self.weight.shape[1]
        if x.shape[-1] != own:
            raise ValueError(
                f"the input has {x.shape[-1]} features, this rank's part of {self.in_features} is "
                f"{own}: give what a ColumnParallelLinear divided in the same way returns"
            )
        y = F.linear(x, self.weight)  # (..., out_features), a term
        if self.sequence_dim is None:
            y = sum_over_ranks(y, self.group)
        else:
            y = sum_and_split(y, self.sequence_dim, self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return _described(self)


def column_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, sequence_dim: int | None, group: Group
) -> Tensor:
    """`x` times this rank's `weight` (out/t, in); the gradient of `x` is summed over the ranks.

    With `sequence_dim`, `x` is this rank's part of the tokens, and so is its gradient.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):  # backward has no autocast: cast where autograd sees it
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if sequence_dim is not None:
        return sequence_column_parallel(x, weight, bias, sequence_dim, group)
    return _ColumnParallel.apply(x, weight, bias, group)


class _ColumnParallel(torch.autograd.Function):
    """f and the product in one, so that the sum of f runs while the weight's gradient is made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grad_x, work = None, None
        if wants_x:
            grad_x = grad @ weight
            work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        rows = grad.reshape(-1, weight.shape[0])
        grad_weight = rows.t() @ x.reshape(-1, weight.shape[1]) if wants_weight else None
        grad_bias = rows.sum(0) if wants_bias else None
        if work is not None:
            work.wait()
        return grad_x, grad_weight, grad_bias, None


def own_param(param: Tensor, part: Tensor) -> nn.Parameter:
    """Memory of its own, trained if `param` is."""
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), param.requires_grad)


def _described(layer: ColumnParallelLinear | RowParallelLinear) -> str:
    own = f"{layer.features.start}:{layer.features.stop}"
    bias = layer.bias is not None
    return f"{layer.in_features}, {layer.out_features}, features {own} here, bias={bias}"
