"""One layer on several ranks: each holds a slice of its weight and computes with that."""

from pdt.tensor_parallel.attention import (
    GroupedAttention,
    ParallelAttention,
    ParallelGroupedAttention,
)
from pdt.tensor_parallel.dropout import OwnDropout, own_stream, stream
from pdt.tensor_parallel.gpt import ParallelGPT, parallelize
from pdt.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pdt.tensor_parallel.regions import copy_to_ranks, sum_over_ranks
from pdt.tensor_parallel.sequence import (
    gather_sequence,
    own_part,
    sum_and_split,
    sum_partial_grads,
)
from pdt.tensor_parallel.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "GroupedAttention",
    "OwnDropout",
    "ParallelAttention",
    "ParallelGPT",
    "ParallelGroupedAttention",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_to_ranks",
    "gather_sequence",
    "own_part",
    "own_stream",
    "parallelize",
    "stream",
    "sum_and_split",
    "sum_over_ranks",
    "sum_partial_grads",
    "vocab_parallel_cross_entropy",
]
