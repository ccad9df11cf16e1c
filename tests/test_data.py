"""The text: its splits, and batches that do not depend on how many ranks share them."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from pdt.model import TextData, english_text, synthetic_tokens
from pdt.model.data import split_text

TEXT = "\n\n".join(f"paragraph {i} of a text, {i * i}" for i in range(90))


def test_the_text_is_english_and_needs_no_download() -> None:
    text = english_text()
    assert 300_000 < len(text) < 700_000
    assert text.count(" the ") > 3_000


def test_a_python_without_the_text_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(RuntimeError, match=r"lacks the module pydoc_data\.topics.*your own"):
        TextData(8)
    assert TextData(8, TEXT).num_samples() > 0


def test_validation_holds_no_paragraph_of_the_training_text() -> None:
    train, validation = split_text(english_text())
    assert not set(train.split("\n\n")) & set(validation.split("\n\n"))
    assert 0.07 < len(validation) / len(train) < 0.13


def test_a_text_without_paragraphs_is_split_too() -> None:
    assert split_text("x" * 90 + "y" * 10) == ("x" * 90, "y" * 10)


def test_tokens_are_the_bytes_of_the_text() -> None:
    data = TextData(4, "naïve £5 " * 30)
    assert bytes(data.splits["train"].tolist()).decode() == split_text("naïve £5 " * 30)[0]


def test_targets_are_the_tokens_one_place_on() -> None:
    tokens, targets = TextData(16, TEXT).batch(3, 0, 1, 4)
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 12])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_ranks_parts_are_the_same_global_batch(world_size: int, split: str) -> None:
    data = TextData(16, TEXT, seed=5)
    for step in range(30):  # several epochs: batches that straddle two are among them
        whole = data.batch(step, 0, 1, 12, split)
        parts = [data.batch(step, rank, world_size, 12, split) for rank in range(world_size)]
        for i in range(2):
            assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])


def test_no_sample_comes_twice_within_an_epoch() -> None:
    data = TextData(16, TEXT)
    epoch_size = data.num_samples()
    assert epoch_size % 7  # so batches straddle epochs
    samples = torch.cat([data.batch(step, 0, 1, 7)[0] for step in range(epoch_size)])
    epochs = [[tuple(s) for s in e.tolist()] for e in samples.split(epoch_size)]
    assert len(set(epochs[0])) == epoch_size
    assert all(set(epoch) == set(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs) == 7


def test_a_batch_may_exceed_an_epoch() -> None:
    data = TextData(16, TEXT)
    tokens, _ = data.batch(1, 0, 1, 3 * data.num_samples())
    assert len(tokens) == 3 * data.num_samples()


def test_the_order_depends_on_the_seed() -> None:
    first, second = (TextData(16, TEXT, seed=seed).batch(0, 0, 1, 8)[0] for seed in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_validation_counts_each_token_exactly_once(world_size: int, batch_size: int) -> None:
    data = TextData(16, TEXT)
    tokens = data.splits["validation"]
    ranks = [list(data.validation_batches(r, world_size, batch_size)) for r in range(world_size)]
    pieces = [batch for step in zip(*ranks, strict=True) for batch in step]
    inputs = torch.cat([piece[0] for piece in pieces]).flatten()
    targets = torch.cat([piece[1] for piece in pieces]).flatten()
    counted = targets != -100
    assert torch.equal(targets[counted], tokens[1:])
    assert torch.equal(inputs[counted], tokens[:-1])
    assert {piece[0].shape for piece in pieces} == {(batch_size, 16)}
    assert inputs.min() >= 0


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ((0, 2, 2, 4), "rank 2 is not one of the 2 ranks"),
        ((0, -1, 2, 4), "rank -1 is not one of the 2 ranks"),
        ((0, 0, 3, 8), "batch_size 8 must be a positive multiple of world_size 3"),
        ((0, 0, 1, 0), "batch_size 0 must be a positive multiple"),
        ((0, 0, 1, 4, "test"), "split must be 'train' or 'validation', got 'test'"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[int, int, int, int], shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        TextData(16, TEXT).batch(*arguments)


def test_a_text_shorter_than_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match=r"validation split has .* block_size 1000 needs 1001"):
        TextData(1000, TEXT)


def test_synthetic_tokens_follow_their_law() -> None:
    tokens = synthetic_tokens(7, 50, 40, vocab_size=101, choices=4)
    noise = (tokens[:, 1:] - 3 * tokens[:, :-1]) % 101
    assert tokens.shape == (50, 40)
    assert noise.unique().tolist() == [0, 1, 2, 3]
    frequencies = noise.flatten().bincount() / noise.numel()
    entropy = -(frequencies * frequencies.log()).sum().item()
    assert entropy == pytest.approx(math.log(4), rel=0.01)


def test_synthetic_tokens_are_the_same_everywhere() -> None:
    assert torch.equal(synthetic_tokens(7, 5, 9), synthetic_tokens(7, 5, 9))
    assert not torch.equal(synthetic_tokens(7, 5, 9), synthetic_tokens(8, 5, 9))
    assert synthetic_tokens(0, 1, 6).tolist() == [[195, 76, 229, 175, 16, 51]]


@pytest.mark.parametrize("choices", [0, 12])
def test_impossible_choices_are_refused(choices: int) -> None:
    with pytest.raises(ValueError, match=f"choices {choices} must be from 1 to vocab_size 11"):
        synthetic_tokens(0, 1, 5, vocab_size=11, choices=choices)
