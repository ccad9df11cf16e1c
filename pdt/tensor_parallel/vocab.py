"""The vocabulary over ranks: an embedding of which each rank has some rows, and a loss for logits
that nobody gathers.

Shoeybi et al. 2019, section 3 (arXiv:1909.08053). Rows are divided unevenly where their number
demands it, so nothing is padded, and no row that is not there takes probability or a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pdt.tensor_parallel.linear import own_param, own_slice
from pdt.tensor_parallel.regions import Group, sum_over_ranks
from pdt.tensor_parallel.sequence import sum_and_split


class VocabParallelEmbedding(nn.Module):
    """Of `embedding`, which all ranks have alike, this rank's rows: (num_embeddings/t, dim).

    The tokens (...,) are the same on all ranks, and so is the output (..., dim): a sum, in which
    all but one rank have zero for a token. Raises IndexError for a token that is none, on a CPU; on
    a GPU, where that would wait for the device, its vector is zero. With `sequence_dim`, the output
    is this rank's part of the tokens along it.
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        *,
        group: Group = None,
        sequence_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim
        if embedding.max_norm is not None or embedding.sparse:
            raise ValueError("max_norm and sparse gradients are not for a split embedding")
        self.num_embeddings, self.group = embedding.num_embeddings, group
        self.rows = own_slice(embedding.num_embeddings, group)
        self.weight = own_param(embedding.weight, embedding.weight.detach()[self.rows])
        padding = embedding.padding_idx
        is_own = padding is not None and self.rows.start <= padding < self.rows.stop
        self.padding_row = padding - self.rows.start if is_own else None  # gets no gradient

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.device.type == "cpu" and tokens.numel():
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(
                    f"tokens from {low} to {high} are not all in a vocabulary of "
                    f"{self.num_embeddings}"
                )
        is_here = (tokens >= self.rows.start) & (tokens < self.rows.stop)
        row = torch.where(is_here, tokens - self.rows.start, 0)
        found = F.embedding(row, self.weight, self.padding_row)
        found = torch.where(is_here[..., None], found, 0.0)  # (..., dim), a term
        if self.sequence_dim is not None:
            return sum_and_split(found, self.sequence_dim, self.group)
        return sum_over_ranks(found, self.group)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    *,
    group: Group = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The mean loss over the targets that are not `ignore_index`, on every rank, as torch's.

    `logits` (N, vocab_size/t) are this rank's, `targets` (N,) the same on all ranks. Two
    collectives: the largest logit of each row, and sums that have N elements too, so that nobody
    gathers N x vocab_size. In float32, or float64 for logits in that. The gradient is this rank's
    part of softmax less target.

    Raises ValueError for logits that are not this rank's part: gathered, say.
    """
    rows = own_slice(vocab_size, group)
    if logits.dim() != 2 or logits.shape[1] != rows.stop - rows.start:
        raise ValueError(
            f"logits of this rank's {rows.stop - rows.start} words of {vocab_size} are wanted, "
            f"(N, {rows.stop - rows.start}), got {tuple(logits.shape)}: gathered ones are for "
            "torch's cross_entropy"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing} must be from 0 to 1")
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    settings = (vocab_size, rows.start, group, ignore_index, label_smoothing)
    losses = _Losses.apply(exact, targets, settings)
    return losses.sum() / (targets != ignore_index).sum()


class _Losses(torch.autograd.Function):
    """The loss of each row, zero where it is ignored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, settings: tuple[Any, ...]) -> Tensor:
        vocab_size, start, group, ignore_index, smoothing = settings
        largest = logits.amax(1)  # (N,)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]  # (N, V/t), none above 0
        local = targets - start
        is_here = (local >= 0) & (local < logits.shape[1]) & (targets != ignore_index)
        column = torch.where(is_here, local, 0)
        wanted = shifted.gather(1, column[:, None])[:, 0]
        sums = [torch.where(is_here, wanted, 0.0), shifted.exp().sum(1)]
        if smoothing:
            sums.append(shifted.sum(1))
        stacked = torch.stack(sums)  # (2 or 3, N)
        dist.all_reduce(stacked, group=group)
        normaliser = stacked[1].log()  # of each row, in shifted logits
        losses = normaliser - (1 - smoothing) * stacked[0]
        if smoothing:
            losses = losses - smoothing * stacked[2] / vocab_size
        is_counted = targets != ignore_index
        ctx.save_for_backward(shifted - normaliser[:, None], column, is_here, is_counted)
        ctx.settings = settings
        return torch.where(is_counted, losses, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        log_probs, column, is_here, is_counted = ctx.saved_tensors
        vocab_size, _, _, _, smoothing = ctx.settings
        grad_logits = log_probs.exp() - smoothing / vocab_size
        hit = (1 - smoothing) * is_here.to(grad_logits.dtype)
        grad_logits.scatter_add_(1, column[:, None], -hit[:, None])
        return grad_logits * torch.where(is_counted, grad, 0.0)[:, None], None, None
