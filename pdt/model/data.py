"""Text that needs no download, and batches that are the same whatever the number of ranks."""

from collections.abc import Iterator

import torch
from torch import Tensor

IGNORED = -100  # a target that no loss counts


def english_text() -> str:
    """CPython's own help topics: about 465 kB of English prose about Python.

    Raises RuntimeError where a distribution has stripped them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "this Python lacks the module pydoc_data.topics, the text of the course: install the "
            "full standard library (conda's or python.org's has it), or give a text of your own"
        ) from error
    return "\n\n".join(topics.values())


def split_text(text: str) -> tuple[str, str]:
    """The first nine tenths of `text`, and those paragraphs of the rest that are not in them."""
    cut = int(len(text) * 0.9)
    end = text.find("\n\n", cut)
    cut = cut if end < 0 else end
    seen = set(text[:cut].split("\n\n"))
    return text[:cut], "\n\n".join(p for p in text[cut:].split("\n\n") if p not in seen)


def tokenise(text: str) -> Tensor:
    """One token per byte of UTF-8, so the vocabulary has 256 entries; int64, on CPU."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


class TextData:
    """Batches of `block_size` tokens from a text, for training, and all of its end, to validate.

    The same on every rank, and stateless: a batch follows from its arguments and `seed` alone.
    Raises ValueError if either split is shorter than one sample.
    """

    def __init__(self, block_size: int, text: str | None = None, *, seed: int = 0) -> None:
        self.block_size, self.seed = block_size, seed
        train, validation = split_text(english_text() if text is None else text)
        self.splits = {"train": tokenise(train), "validation": tokenise(validation)}
        for name, tokens in self.splits.items():
            if len(tokens) <= block_size:
                raise ValueError(
                    f"the {name} split has {len(tokens)} tokens, block_size {block_size} needs "
                    f"{block_size + 1}: give a longer text or a smaller block_size"
                )

    def num_samples(self, split: str = "train") -> int:
        """The whole samples of `split`: an epoch. A sample is `block_size` tokens and the next."""
        return (len(self._tokens(split)) - 1) // self.block_size

    def batch(
        self, step: int, rank: int, world_size: int, batch_size: int, split: str = "train"
    ) -> tuple[Tensor, Tensor]:
        """This rank's part of global batch `step`: tokens and targets, (batch_size/world_size, T).

        The parts of all ranks, in order, are the same global batch for every `world_size`. No
        sample comes twice within an epoch, and each epoch has an order of its own.
        """
        _check_rank(rank, world_size)
        if batch_size < 1 or batch_size % world_size:
            raise ValueError(
                f"batch_size {batch_size} must be a positive multiple of world_size {world_size}"
            )
        local = batch_size // world_size
        first = step * batch_size + rank * local
        return self._samples(split, self._sample_numbers(first, local, split))

    def validation_batches(
        self, rank: int, world_size: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share of the validation split, `batch_size` samples at a time.

        Each token but the first is a target on exactly one rank, exactly once. Every rank gets
        the same number of equal shapes, so that forwards which communicate stay in step: what is
        lacking is filled with targets of -100. Sum losses and counts; do not average means.
        """
        _check_rank(rank, world_size)
        tokens, T = self._tokens("validation"), self.block_size
        stride = world_size * batch_size
        num_batches = -(-(len(tokens) - 1) // (T * stride))
        padded = torch.full((num_batches * stride * T + 1,), IGNORED)
        padded[: len(tokens)] = tokens
        for first in range(rank * batch_size, num_batches * stride, stride):
            piece = padded[first * T : (first + batch_size) * T + 1]
            inputs, targets = piece[:-1].view(-1, T), piece[1:].view(-1, T)  # (batch_size, T)
            yield inputs.clamp(min=0), targets

    def _tokens(self, split: str) -> Tensor:
        if split not in self.splits:
            raise ValueError(f"split must be 'train' or 'validation', got {split!r}")
        return self.splits[split]

    def _sample_numbers(self, first: int, count: int, split: str) -> Tensor:
        """Which samples stand at places `first` ... `first + count - 1` of the endless order."""
        epoch_size = self.num_samples(split)
        epochs = range(first // epoch_size, (first + count - 1) // epoch_size + 1)
        orders = [self._order(epoch, epoch_size) for epoch in epochs]
        start = first % epoch_size
        return torch.cat(orders)[start : start + count]

    def _order(self, epoch: int, epoch_size: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(epoch_size, generator=generator)

    def _samples(self, split: str, numbers: Tensor) -> tuple[Tensor, Tensor]:
        offsets = numbers[:, None] * self.block_size + torch.arange(self.block_size)  # (B, T)
        tokens = self._tokens(split)
        return tokens[offsets], tokens[offsets + 1]


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of the {world_size} ranks of world_size")


def synthetic_tokens(
    seed: int, num_samples: int, length: int, *, vocab_size: int = 256, choices: int = 4
) -> Tensor:
    """Random sequences that can be learnt, (num_samples, length), the same on every machine.

    Each token is `3 * previous + noise` modulo `vocab_size` with `choices` equal values of noise,
    so no model's loss can stay below log(choices). Numbers that are checked come from these: the
    text of `english_text` differs between versions of Python.
    """
    if not 1 <= choices <= vocab_size:
        raise ValueError(f"choices {choices} must be from 1 to vocab_size {vocab_size}")
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(choices, (num_samples, length), generator=generator)
    tokens = torch.randint(vocab_size, (num_samples, length), generator=generator)
    for t in range(1, length):  # only the first of the random tokens stays
        tokens[:, t] = (3 * tokens[:, t - 1] + noise[:, t]) % vocab_size
    return tokens
