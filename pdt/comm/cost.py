"""What a collective sends and how long a wire takes for it: pure laws, no process group.

S is the payload in bytes, n the number of ranks, L a link's latency, B its bandwidth. A message of
m bytes takes L + m/B. A rank has one port: it sends one message and receives one at a time.

| op                         | algorithm           | a rank sends | time                    |
|----------------------------|---------------------|--------------|-------------------------|
| all_reduce                 | ring, 2(n-1) steps  | 2(n-1)/n S   | 2(n-1) L + 2(n-1)/n S/B |
| all_gather, reduce_scatter | ring, n-1 steps     | (n-1)/n S    | (n-1) L + (n-1)/n S/B   |
| all_to_all                 | n-1 exchanges       | (n-1)/n S    | (n-1) L + (n-1)/n S/B   |
| broadcast, reduce          | pipelined chain     | (n-1)/n S    | (n-1) L + S/B           |
| gather, scatter            | through root's port | (n-1)/n^2 S  | (n-1) L + (n-1)/n S/B   |
| send, recv                 | one message         | S, 0         | L + S/B                 |
| barrier                    | dissemination       | 0            | ceil(log2 n) L          |

S is one tensor; in the rows with pieces (gathers, scatters, all_to_all) it is n pieces together.
Where ranks do not send alike the table gives their mean: in a chain all but the last send S. The
chain's time is its limit for many small pieces. One rank sends nothing and takes no time.
Sources: Thakur, Rabenseifner and Gropp 2005 (trees, rings, the law itself); Patarasuk and Yuan
2009 (the ring all-reduce sends the least possible).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdt.comm.topology import Link


class Law(NamedTuple):
    """One row of the table as functions of n; a share (a, b) means a/b of the payload."""

    steps: Callable[[int], int]  # latencies, one after the other
    port: Callable[[int], tuple[int, int]]  # share that passes through the busiest port
    sent: Callable[[int], tuple[int, int]]  # share that a rank sends, mean over the ranks


def _log2_ceil(n: int) -> int:
    return (n - 1).bit_length()


_RING = Law(lambda n: n - 1, lambda n: (n - 1, n), lambda n: (n - 1, n))
_CHAIN = Law(lambda n: n - 1, lambda n: (1, 1), lambda n: (n - 1, n))
_ROOT = Law(lambda n: n - 1, lambda n: (n - 1, n), lambda n: (n - 1, n * n))
LAWS = {
    "all_reduce": Law(
        lambda n: 2 * (n - 1), lambda n: (2 * (n - 1), n), lambda n: (2 * (n - 1), n)
    ),
    "all_gather": _RING,
    "reduce_scatter": _RING,
    "all_to_all": _RING,
    "broadcast": _CHAIN,
    "reduce": _CHAIN,
    "gather": _ROOT,
    "scatter": _ROOT,
    "send": Law(lambda n: 1, lambda n: (1, 1), lambda n: (1, 1)),
    "recv": Law(lambda n: 1, lambda n: (1, 1), lambda n: (0, 1)),
    "barrier": Law(_log2_ceil, lambda n: (0, 1), lambda n: (0, 1)),
}


def _check(nbytes: float, n: int) -> None:
    if n < 1:
        raise ValueError(f"n must be at least 1 rank, got {n}")
    if nbytes < 0:
        raise ValueError(f"nbytes must be 0 or more, got {nbytes}")


def _law(op: str, nbytes: float, n: int) -> Law:
    _check(nbytes, n)
    if op not in LAWS:
        raise ValueError(f"op {op!r} is not one of {', '.join(LAWS)}")
    return LAWS[op]


def wire_nbytes(op: str, nbytes: float, n: int) -> float:
    """Bytes that a rank sends (mean over the ranks) for payload `nbytes` on `n` ranks."""
    share, whole = _law(op, nbytes, n).sent(n)
    return share * nbytes / whole if n > 1 else 0.0


def time_s(op: str, nbytes: float, n: int, link: Link) -> float:
    """Seconds from the first byte to the last, by the same algorithm, all hops over `link`.

    The inside of a two-level link is not looked at: choose by `link.slowest(ranks)` first.
    """
    law = _law(op, nbytes, n)
    share, whole = law.port(n)
    return law.steps(n) * link.latency_s + share * nbytes / whole / link.bandwidth if n > 1 else 0.0


def ring_all_reduce_s(nbytes: float, n: int, link: Link) -> float:
    """A ring's time: 2(n-1) messages of 1/n of the tensor, one after the other."""
    return time_s("all_reduce", nbytes, n, link)


def tree_broadcast_s(nbytes: float, n: int, link: Link) -> float:
    """A binomial tree's time: ceil(log2 n) rounds, each sends the whole tensor."""
    _check(nbytes, n)
    return _log2_ceil(n) * (link.latency_s + nbytes / link.bandwidth)


def tree_all_reduce_s(nbytes: float, n: int, link: Link) -> float:
    """Sum up a binomial tree, then broadcast down it: 2 ceil(log2 n) whole tensors."""
    return 2 * tree_broadcast_s(nbytes, n, link)


def parameter_server_s(nbytes: float, n: int, link: Link) -> float:
    """All send to rank 0, which answers all: its port carries n-1 tensors in, then n-1 out."""
    _check(nbytes, n)
    return 2 * (n - 1) * (link.latency_s + nbytes / link.bandwidth)


def crossover_nbytes(n: int, link: Link) -> float:
    """The tensor size from which a ring all-reduce is as fast as a tree's, in bytes.

    From 2(n-1) L + 2(n-1)/n S/B = 2k (L + S/B) with k = ceil(log2 n):
    S = L B (n-1-k) / (k - (n-1)/n). Up to 3 ranks it is 0: the ring never loses.
    """
    _check(0, n)
    rounds = _log2_ceil(n)
    if n - 1 == rounds or n == 1:
        return 0.0
    return link.latency_s * link.bandwidth * (n - 1 - rounds) / (rounds - (n - 1) / n)


def two_level_all_reduce_s(nbytes: float, nodes: int, ranks_per_node: int, link: Link) -> float:
    """Reduce-scatter inside each node, all-reduce the shards between nodes, all-gather inside.

    Every rank has a port of its own to the other nodes, through which 2(nodes-1)/nodes of its
    shard of S/ranks_per_node passes; a flat ring sends 2(n-1)/n of S over the slow hop.
    """
    if link.ranks_per_node not in (None, ranks_per_node):
        raise ValueError(
            f"ranks_per_node is {ranks_per_node}, but the link has {link.ranks_per_node}"
        )
    inside = link.inside or link
    shard = nbytes / max(ranks_per_node, 1)
    return 2 * time_s("all_gather", nbytes, ranks_per_node, inside) + time_s(
        "all_reduce", shard, nodes, link
    )


def bucketed_s(nbytes: float, bucket_nbytes: float, n: int, link: Link) -> float:
    """Ring all-reduces one after the other, one for each bucket; the last holds the rest."""
    _check(nbytes, n)
    if not bucket_nbytes > 0:
        raise ValueError(f"bucket_nbytes must be positive, got {bucket_nbytes}")
    if nbytes <= bucket_nbytes:
        return ring_all_reduce_s(nbytes, n, link) if nbytes else 0.0
    full, rest = divmod(nbytes, bucket_nbytes)
    last_s = bucketed_s(rest, bucket_nbytes, n, link)
    return full * ring_all_reduce_s(bucket_nbytes, n, link) + last_s


@dataclass(frozen=True)
class Fit:
    """The line `latency_s + nbytes / bandwidth` through measured times, and how well it fits."""

    latency_s: float
    bandwidth: float
    r2_log: float

    def time_s(self, nbytes: float) -> float:
        """The line's time for `nbytes`."""
        return self.latency_s + nbytes / self.bandwidth

    def link(self, op: str, n: int) -> Link:
        """The link on which `op` among `n` ranks would take the times of this line."""
        if n < 2:
            raise ValueError(f"n must be at least 2 ranks to show a link, got {n}")
        return Link(
            self.latency_s / time_s(op, 0, n, Link(1.0, math.inf)),
            self.bandwidth * time_s(op, 1, n, Link(0.0, 1.0)),
        )


def fit_alpha_beta(nbytes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Least squares of the relative error, so that small and large sizes count alike.

    Minimises sum((a + S/B) / t - 1)^2 with a, 1/B >= 0; `r2_log` is R^2 of log(time).
    """
    if len(nbytes) != len(seconds) or len(set(nbytes)) < 2:
        raise ValueError(
            f"need times of at least 2 different sizes, got {len(nbytes)} nbytes "
            f"({len(set(nbytes))} different) and {len(seconds)} seconds"
        )
    if not all(0 < t < math.inf for t in seconds):
        raise ValueError(f"seconds must all be positive, got {min(seconds)}..{max(seconds)}")
    weights = [1 / t**2 for t in seconds]
    latency_s, per_byte = _weighted_line(nbytes, seconds, weights)
    bandwidth = 1 / per_byte if per_byte > 0 else math.inf
    predicted = [latency_s + s / bandwidth for s in nbytes]
    return Fit(latency_s, bandwidth, _r2_log(seconds, predicted))


def _weighted_line(
    x: Sequence[float], y: Sequence[float], weights: Sequence[float]
) -> tuple[float, float]:
    """Intercept and slope, neither negative, that minimise sum(w (intercept + slope x - y)^2)."""
    total = sum(weights)
    x_mean = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    y_mean = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    terms = list(zip(weights, x, y, strict=True))
    slope = sum(w * (a - x_mean) * (b - y_mean) for w, a, b in terms)
    slope /= sum(w * (a - x_mean) ** 2 for w, a, _ in terms)
    if slope < 0:
        return y_mean, 0.0
    if y_mean - slope * x_mean < 0:
        return 0.0, sum(w * a * b for w, a, b in terms) / sum(w * a * a for w, a, _ in terms)
    return y_mean - slope * x_mean, slope


def _r2_log(measured: Sequence[float], predicted: Sequence[float]) -> float:
    logs = [math.log(t) for t in measured]
    mean = sum(logs) / len(logs)
    spread = sum((t - mean) ** 2 for t in logs)
    error = sum((t - math.log(p)) ** 2 for t, p in zip(logs, predicted, strict=True))
    return 1 - error / spread if spread > 0 else 1.0 if error < 1e-12 else 0.0
