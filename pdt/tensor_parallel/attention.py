"""Attention split by its heads, each of which a rank has whole: queries, keys, values, result.

A head computes from all tokens and its own features, so that ranks with different heads have
nothing to tell each other until their results are projected (Shoeybi et al. 2019, section 3,
arXiv:1909.08053). Where several heads of queries share one of keys and values (Ainslie et al. 2023,
arXiv:2305.13245), a rank has the queries' heads of whole groups; with fewer groups than ranks,
several ranks compute the same keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pdt.model.gpt import Attention, Dropout
from pdt.tensor_parallel.dropout import own_stream
from pdt.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
    own_param,
    part_of,
)
from pdt.tensor_parallel.regions import Group, copy_to_ranks


class ParallelAttention(Attention):
    """Of `attention`, which all ranks have alike, this rank's heads; in and out as `Attention`.

    What is dropped within the heads is each rank's own, `dropout` is for the result. Raises
    ValueError with fewer heads than ranks.
    """

    def __init__(
        self,
        attention: Attention,
        *,
        dropout: Dropout | None = None,
        group: Group = None,
        sequence_dim: int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        hs = attention.head_size
        self.head_size, self.unfused, self.group = hs, attention.unfused, group
        self.qkv = ColumnParallelLinear(  # type: ignore[assignment]
            attention.qkv, group=group, multiple_of=3 * hs, sequence_dim=sequence_dim
        )
        self.proj = RowParallelLinear(  # type: ignore[assignment]
            attention.proj, group=group, multiple_of=hs, sequence_dim=sequence_dim
        )
        self.dropout = attention.dropout if dropout is None else dropout

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.training or self.dropout.p == 0:
            return super().core(q, k, v)
        with own_stream(self.group):
            return super().core(q, k, v)


@dataclass(frozen=True)
class Heads:
    """One rank's heads: of the queries, and of the keys and values that these need."""

    queries: slice
    keys: slice
    is_replicated: bool  # whether several ranks may need the same keys and values
    key_of: tuple[int, ...]  # for each of its queries' heads, which of its keys'


def divide_heads(num_heads: int, num_kv_heads: int, rank: int, n: int) -> Heads:
    """What `rank` of `n` computes, the first ranks one more where they do not come out even.

    Raises ValueError where `num_kv_heads` does not divide `num_heads`, and where a rank would have
    no head.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads {num_kv_heads} must divide num_heads {num_heads}")
    if num_heads < n:
        raise ValueError(
            f"{num_heads} heads are too few for {n} ranks: one would have none; use {num_heads} "
            "ranks at most"
        )
    per_key = num_heads // num_kv_heads
    is_replicated = num_kv_heads < n
    queries = part_of(num_heads, rank, n, multiple_of=1 if is_replicated else per_key)
    keys = slice(queries.start // per_key, (queries.stop - 1) // per_key + 1)
    key_of = tuple(q // per_key - keys.start for q in range(queries.start, queries.stop))
    return Heads(queries, keys, is_replicated, key_of)


class GroupedAttention(nn.Module):
    """Causal attention in which `num_heads / num_kv_heads` heads share their keys and values."""

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, *, bias: bool = True
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"num_heads {num_heads} must divide hidden_size {hidden_size}")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size = hidden_size // num_heads
        self.key_of = divide_heads(num_heads, num_kv_heads, 0, 1).key_of
        self.q = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k = nn.Linear(hidden_size, num_kv_heads * self.head_size, bias=bias)
        self.v = nn.Linear(hidden_size, num_kv_heads * self.head_size, bias=bias)
        self.proj = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (-1, self.head_size)).transpose(1, 2) for part in self.project(x)
        )  # (B, nh or kvh, T, hs)
        of = torch.tensor(self.key_of, device=x.device)
        y = F.scaled_dot_product_attention(q, k[:, of], v[:, of], is_causal=True)  # (B, nh, T, hs)
        return self.proj(y.transpose(1, 2).flatten(2))  # (B, T, D)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries (B, T, nh hs), keys and values (B, T, kvh hs)."""
        return self.q(x), self.k(x), self.v(x)


class ParallelGroupedAttention(GroupedAttention):
    """Of `attention`, which all ranks have alike, this rank's heads; x is the same on all ranks.

    With at least as many heads of keys as ranks, each rank has its own. With fewer, every rank has
    all their weights, and computes the heads that it needs; the gradient of a head comes from all
    ranks that need it, so it is summed over the ranks, by a collective of the weights' size in
    backward, and is the same on all. Two collectives of the activations' size, as of any pair.
    """

    def __init__(
        self, attention: GroupedAttention, *, group: Group = None, sequence_dim: int | None = None
    ) -> None:
        nn.Module.__init__(self)
        num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
        hs, rank, n = attention.head_size, dist.get_rank(group), dist.get_world_size(group)
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, hs
        self.group, self.sequence_dim = group, sequence_dim
        self.heads = heads = divide_heads(num_heads, num_kv_heads, rank, n)
        self.key_of = heads.key_of
        own_keys = slice(0, num_kv_heads) if heads.is_replicated else heads.keys
        self.q = _Rows(attention.q, _times(heads.queries, hs))  # type: ignore[assignment]
        self.k = _Rows(attention.k, _times(own_keys, hs))  # type: ignore[assignment]
        self.v = _Rows(attention.v, _times(own_keys, hs))  # type: ignore[assignment]
        together = hs if heads.is_replicated else hs * (num_heads // num_kv_heads)
        self.proj = RowParallelLinear(  # type: ignore[assignment]
            attention.proj, group=group, multiple_of=together, sequence_dim=sequence_dim
        )

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """As one product, so that the gradient of x is summed once, while those of the weights are
        made. The graph keeps a copy of the weights, side by side."""
        held = [(self.q.weight, self.q.bias), self._needed(self.k), self._needed(self.v)]
        weight = torch.cat([w for w, _ in held])
        biases = [b for _, b in held if b is not None]
        bias = torch.cat(biases) if biases else None
        y = column_parallel(x, weight, bias, self.sequence_dim, self.group)
        return y.split([w.shape[0] for w, _ in held], dim=2)

    def _needed(self, layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """The rows of this rank's heads; in a weight that all ranks have, by way of f."""
        if not self.heads.is_replicated:
            return layer.weight, layer.bias
        rows = _times(self.heads.keys, self.head_size)
        weight = copy_to_ranks(layer.weight, self.group)[rows]
        bias = None if layer.bias is None else copy_to_ranks(layer.bias, self.group)[rows]
        return weight, bias


class _Rows(nn.Module):
    """Some rows of a linear layer."""

    def __init__(self, linear: nn.Linear, rows: slice) -> None:
        super().__init__()
        self.rows = rows
        self.weight = own_param(linear.weight, linear.weight.detach()[rows])
        self.bias = None
        if linear.bias is not None:
            self.bias = own_param(linear.bias, linear.bias.detach()[rows])


def _times(heads: slice, head_size: int) -> slice:
    return slice(heads.start * head_size, heads.stop * head_size)
