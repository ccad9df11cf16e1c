"""Random streams: one that all ranks draw alike, and one of each rank's own.

Where the ranks have an activation alike, a dropout must drop the same elements on all of them, or
they hold different models' activations; where each has its part, of the heads or of the tokens,
each must drop others, or the parts are dropped alike. torch draws from one generator, so ranks
that are seeded equally agree, and `own_stream` leads aside.

Both streams follow from the state in which torch's generator is found, and nothing else is kept.
So a checkpoint that restores this state, as torch's and `pdt.offload`'s do, draws the same again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from pdt.model.gpt import Dropout
from pdt.tensor_parallel.regions import Group


@contextmanager
def stream(*key: int) -> Iterator[None]:
    """Draw from a stream that follows from `key` alone; outside goes on as if nothing had been.

    On the CPU and on the current GPU. Around a forward pass, `stream(seed, step)` lets the ranks
    agree whatever else they draw between the steps, a data loader on one of them, say. Replicas on
    other data put their number in the key.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "big", signed=True)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield


@contextmanager
def own_stream(group: Group = None) -> Iterator[None]:
    """Draw from a stream of this rank's own, where ranks have different parts.

    Its key is one number from the stream outside, which moves on by that on every rank, and the
    rank. The ranks must agree outside.
    """
    drawn = int(torch.randint(2**62, (), device="cpu"))
    with stream(drawn, dist.get_rank(group)):
        yield


class OwnDropout(Dropout):
    """A dropout of this rank's own elements: of its heads, or of its part of the tokens."""

    def __init__(self, p: float, *, group: Group = None) -> None:
        super().__init__(p)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        with own_stream(self.group):
            return super().forward(x)
