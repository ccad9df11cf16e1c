"""A wire's latency and bandwidth, and which wire two ranks talk over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True)
class Link:
    """A wire: `latency_s` seconds per message and `bandwidth` bytes per second (inf is free).

    With `ranks_per_node`, ranks of one node (0..k-1, k..2k-1, ...) talk over the link `inside`.
    """

    latency_s: float
    bandwidth: float
    ranks_per_node: int | None = None
    inside: Link | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s must be 0 or more seconds, got {self.latency_s}")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth must be positive (bytes per second), got {self.bandwidth}")
        if (self.ranks_per_node is None) != (self.inside is None):
            raise ValueError(
                "ranks_per_node and inside come together: give both or neither, got "
                f"ranks_per_node={self.ranks_per_node}, inside={self.inside}"
            )
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be at least 1, got {self.ranks_per_node}")

    def between(self, rank_a: int, rank_b: int) -> Link:
        """The flat link over which two global ranks talk."""
        if self.ranks_per_node is None or self.inside is None:
            return self
        if rank_a // self.ranks_per_node == rank_b // self.ranks_per_node:
            return self.inside.between(rank_a, rank_b)
        return replace(self, ranks_per_node=None, inside=None)

    def slowest(self, ranks: Sequence[int]) -> Link:
        """The hop with the least bandwidth (then the most latency) of a ring over `ranks`."""
        if not ranks:
            raise ValueError("ranks is empty: a ring needs at least one rank")
        hops = [self.between(a, b) for a, b in pairwise([*ranks, ranks[0]])]
        return min(hops, key=lambda hop: (hop.bandwidth, -hop.latency_s))
