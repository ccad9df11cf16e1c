"""A vocabulary over ranks: the whole embedding's vectors, and torch's loss without a gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdt.tensor_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy
from pdt.tensor_parallel.linear import own_slice

WORLDS = [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]


def batch(vocab_size: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = scale * torch.randn(7, vocab_size, dtype=torch.float64, generator=generator)
    targets = torch.randint(vocab_size, (7,), generator=generator)
    targets[2], targets[3], targets[4] = -100, 0, vocab_size - 1  # ignored, first, last
    return logits.to(dtype), targets


def _loss(
    vocab_size: int, scale: float, smoothing: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, slice]:
    logits, targets = batch(vocab_size, scale, dtype)
    rows = own_slice(vocab_size)
    own = logits[:, rows].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(own, targets, vocab_size, label_smoothing=smoothing)
    (3 * loss).backward()
    assert own.grad is not None
    return loss.detach(), own.grad, rows


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("vocab_size", [8, 9])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_the_loss_and_its_gradient_are_torchs(
    pool: Any, world_size: int, vocab_size: int, smoothing: float, scale: float
) -> None:
    logits, targets = batch(vocab_size, scale, torch.float64)
    logits.requires_grad_()
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    (3 * expected).backward()
    found = pool(world_size).run(_loss, vocab_size, scale, smoothing, torch.float64)
    for loss, grad, rows in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        assert logits.grad is not None
        torch.testing.assert_close(grad, logits.grad[:, rows], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_summed_in_float32(pool: Any, dtype: torch.dtype) -> None:
    logits, targets = batch(9, 3.0, dtype)
    expected = F.cross_entropy(logits.float(), targets)
    for loss, grad, _ in pool(2).run(_loss, 9, 3.0, 0.0, dtype):
        torch.testing.assert_close(loss, expected)
        assert loss.dtype == torch.float32
        assert grad.dtype == dtype


def _ops() -> list[tuple[str, int]]:
    from pdt.comm import meter

    logits, targets = batch(8, 1.0, torch.float64)
    own = logits[:, own_slice(8)].clone().requires_grad_()
    with meter() as m:
        vocab_parallel_cross_entropy(own, targets, 8).backward()
    return [(record.op, record.nbytes) for record in m.records]


def test_nobody_gathers_the_logits(pool: Any) -> None:
    rows = 7 * 8
    assert pool(2).run(_ops) == [[("all_reduce", rows), ("all_reduce", 2 * rows)]] * 2


def _gathered() -> None:
    logits, targets = batch(8, 1.0, torch.float64)
    vocab_parallel_cross_entropy(logits, targets, 8)


def test_gathered_logits_are_refused(pool: Any) -> None:
    from pdt.ranks import RankError

    with pytest.raises(RankError, match=r"this rank's 4 words of 8 .*got \(7, 8\): gathered"):
        pool(2).run(_gathered)


TOKENS = torch.tensor([[0, 4, 8], [8, 3, 4]])


def _embedded(padding_idx: int | None) -> tuple[Tensor, Tensor, slice]:
    torch.manual_seed(0)
    embedding = nn.Embedding(9, 5, padding_idx=padding_idx, dtype=torch.float64)
    split = VocabParallelEmbedding(embedding)
    out = split(TOKENS)
    (out * torch.arange(30.0).view(2, 3, 5)).sum().backward()
    assert split.weight.grad is not None
    return out.detach(), split.weight.grad, split.rows


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("padding_idx", [None, 4])
def test_the_embedding_is_the_whole_one(
    pool: Any, world_size: int, padding_idx: int | None
) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(9, 5, padding_idx=padding_idx, dtype=torch.float64)
    expected = embedding(TOKENS)
    (expected * torch.arange(30.0).view(2, 3, 5)).sum().backward()
    assert embedding.weight.grad is not None
    for out, grad, rows in pool(world_size).run(_embedded, padding_idx):
        assert torch.equal(out, expected)
        torch.testing.assert_close(grad, embedding.weight.grad[rows])


def _outside() -> None:
    VocabParallelEmbedding(nn.Embedding(9, 5))(torch.tensor([3, 9]))


def test_a_token_that_is_none_is_refused(pool: Any) -> None:
    from pdt.ranks import RankError

    with pytest.raises(RankError, match="tokens from 3 to 9 are not all in a vocabulary of 9"):
        pool(2).run(_outside)


def _tied() -> tuple[Tensor, bool]:
    from pdt.tensor_parallel import ColumnParallelLinear

    torch.manual_seed(0)
    embedding = nn.Embedding(9, 5, dtype=torch.float64)
    head = nn.Linear(5, 9, bias=False, dtype=torch.float64)
    head.weight = embedding.weight
    split, split_head = VocabParallelEmbedding(embedding), ColumnParallelLinear(head)
    split_head.weight = split.weight
    logits = split_head(split(TOKENS)).flatten(0, 1)
    vocab_parallel_cross_entropy(logits, TOKENS.flatten(), 9).backward()
    assert split.weight.grad is not None
    return split.weight.grad, split_head.weight is split.weight


def test_a_tied_head_adds_to_the_embeddings_gradient(pool: Any) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(9, 5, dtype=torch.float64)
    logits = embedding(TOKENS) @ embedding.weight.t()
    F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()).backward()
    found = pool(2).run(_tied)
    assert all(is_tied for _, is_tied in found)
    whole = torch.cat([grad for grad, _ in found])
    torch.testing.assert_close(whole, embedding.weight.grad, rtol=1e-10, atol=1e-12)
