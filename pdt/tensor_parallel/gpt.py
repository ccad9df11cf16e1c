"""The small GPT with every matrix split over ranks: its heads, its hidden features, its words.

A step sums four times a layer over all ranks (B, T, D): behind the two row-parallel layers in
forward, before the two column-parallel ones in backward. Each sum takes 2 BTD (t-1)/t elements
a rank, a layer 8 BTD (t-1)/t (Narayanan et al. 2021, section 3, arXiv:2104.04473). The embedding,
in forward, and the head, in backward, have one more each; the loss sums 3 BT elements.

With the sequence divided between the split layers, each sum is a reduce-scatter and an all-gather
of as many bytes (Korthikanti et al. 2022, section 4.2.2, arXiv:2205.05198), and backward gathers
the inputs of the column-parallel layers once more, BTD (t-1)/t elements each: two a layer, and the
head's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdt.model.gpt import GPT, Block, Dropout
from pdt.tensor_parallel.attention import ParallelAttention
from pdt.tensor_parallel.dropout import OwnDropout
from pdt.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pdt.tensor_parallel.regions import Group, sum_over_ranks
from pdt.tensor_parallel.sequence import own_part, sum_partial_grads
from pdt.tensor_parallel.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy


def parallelize(model: GPT, group: Group = None, *, sequence: bool = False) -> ParallelGPT:
    """`model`, which all ranks have alike, as one model of which each rank has its part.

    Heads, hidden features and words are divided, unevenly where they must be; norms, positions and
    the biases of the projections are on every rank. Names of parameters stay. `model` is taken
    apart, layer by layer, so that its matrices are freed: go on with what is returned, and make the
    optimizer for that.

    With `sequence`, activations between the split layers are divided by tokens, whose number must
    be a multiple of the ranks', and `sum_partial_grads` is due after backward. Raises ValueError
    where there are fewer heads, hidden features or words than ranks.
    """
    return ParallelGPT(model, group, sequence=sequence)


class ParallelGPT(GPT):
    """A rank's part of a GPT. Takes whole batches, the same on all ranks, as `GPT` does.

    Dropouts agree on all ranks where activations do, as long as the ranks' generators do: seed
    them alike, or see `stream`.
    """

    def __init__(self, model: GPT, group: Group = None, *, sequence: bool = False) -> None:
        nn.Module.__init__(self)
        self.config, self.group, self.sequence = model.config, group, sequence
        dim = 1 if sequence else None
        wte = VocabParallelEmbedding(model.wte, group=group, sequence_dim=dim)
        self.wte, self.rows = wte, wte.rows  # type: ignore[assignment]
        self.wpe = model.wpe
        self.dropout = self._dropout_like(model.dropout)
        self.blocks = model.blocks
        for block in self.blocks:
            assert isinstance(block, Block)
            self._split(block)
        self.ln_f = model.ln_f
        self.lm_head = ColumnParallelLinear(  # type: ignore[assignment]
            model.lm_head, group=group, sequence_dim=dim
        )
        if model.lm_head.weight is model.wte.weight:
            self.lm_head.weight = self.wte.weight
        self.train(model.training)

    def init_weights(self, seed: int) -> None:
        raise RuntimeError(
            "a split model takes its values from the whole one: call init_weights before "
            "parallelize"
        )

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) for `tokens` (B, T); with `targets`, the mean loss of all but -100.

        Both are the same on all ranks. Nobody gathers logits for the loss.
        """
        T, limit = tokens.shape[1], self.config.block_size
        if limit < T:
            raise ValueError(f"{T} tokens exceed block_size {limit}: shorten the input")
        positions = torch.arange(T, device=tokens.device)
        if self.sequence:
            positions = own_part(positions, 0, self.group)
        x = self.dropout(self.wte(tokens) + self.wpe(positions))  # (B, T, D), T/t with sequence
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))  # (B, T, V/t)
        V = self.config.vocab_size
        if targets is None:
            whole = F.pad(logits, (self.rows.start, V - self.rows.stop))
            return sum_over_ranks(whole, self.group)
        flat, wanted = logits.flatten(0, 1), targets.flatten()
        return vocab_parallel_cross_entropy(flat, wanted, V, group=self.group)

    def partial_params(self) -> Iterator[nn.Parameter]:
        """Trained parameters whose gradients are terms: with `sequence`, all that every rank has
        whole, which saw its part of the tokens alone; else none."""
        if not self.sequence:
            return
        split = set()
        for module in self.modules():
            if isinstance(module, ColumnParallelLinear):
                split |= set(module.parameters(recurse=False))
            elif isinstance(module, RowParallelLinear | VocabParallelEmbedding):
                split.add(module.weight)
        yield from (p for p in self.parameters() if p.requires_grad and p not in split)

    def sum_partial_grads(self) -> None:
        """Make the gradients of `partial_params` whole, the same on all ranks, in one collective.

        Once a step, after its last backward and before anything looks at gradients. It sums what
        has accumulated: a second call in the same step would count it t times.
        """
        sum_partial_grads(self.partial_params(), self.group)

    def _split(self, block: Block) -> None:
        dim = 1 if self.sequence else None
        attention, mlp = block.attn, block.mlp
        dropout = self._dropout_like(attention.dropout)
        block.attn = ParallelAttention(
            attention, dropout=dropout, group=self.group, sequence_dim=dim
        )
        mlp.fc = ColumnParallelLinear(  # type: ignore[assignment]
            mlp.fc, group=self.group, sequence_dim=dim
        )
        mlp.proj = RowParallelLinear(  # type: ignore[assignment]
            mlp.proj, group=self.group, sequence_dim=dim
        )
        mlp.dropout = self._dropout_like(mlp.dropout)

    def _dropout_like(self, dropout: Dropout) -> Dropout:
        return OwnDropout(dropout.p, group=self.group) if self.sequence else dropout
