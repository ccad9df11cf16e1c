"""The time of a data-parallel step on n ranks, from one rank's compute and a wire's constants.

Pure. Bucket j leaves when its gradients are ready and the wire is free of the bucket before it; its
all-reduce is a ring's (`pdt.comm.cost`). A step ends with its slowest rank. Each rank's compute is
delayed at random; for exponential delays the slowest of n is delayed H_n = 1 + 1/2 + ... + 1/n
times the mean (Renyi 1953), and one rank alone has the mean already. So compute on n ranks takes
1 + noise (H_n - 1) times as long as on one, and a longer backward also hides more.

Li et al. 2020, sections 3.2.3 and 5 (arXiv:2006.15704).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pdt.comm.cost import ring_all_reduce_s
from pdt.comm.topology import Link

FREE = Link(0.0, math.inf)
MOST_NOISE = 2.0  # of a fit
SECTIONS = 12


def pipelined_s(ready_s: Iterable[float], transfer_s: Iterable[float]) -> float:
    """When the last of some transfers has arrived: each waits until it is ready and the wire free.

    `ready_s` and `transfer_s` are moments and durations in the order of sending.
    """
    free_s = 0.0
    for ready, seconds in zip(ready_s, transfer_s, strict=True):
        free_s = max(free_s, ready) + seconds
    return free_s


def even_buckets(nbytes: float, bucket_nbytes: float) -> tuple[float, ...]:
    """Bytes of the fewest buckets of one size that hold `nbytes` with at most `bucket_nbytes`."""
    if not (nbytes > 0 and bucket_nbytes > 0):
        raise ValueError(f"nbytes={nbytes} and bucket_nbytes={bucket_nbytes} must both be positive")
    count = math.ceil(nbytes / bucket_nbytes)
    return (nbytes / count,) * count


@dataclass(frozen=True)
class DataParallelStep:
    """One step: seconds of one rank's forward, backward and optimizer; bytes of each bucket.

    Buckets come in the order in which they are sent; backward makes gradients at an even pace, in
    bytes. `noise` is a rank's mean random delay as a share of its compute.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    buckets: tuple[float, ...]
    link: Link = FREE
    noise: float = 0.0

    def __post_init__(self) -> None:
        times = (self.forward_s, self.backward_s, self.optimizer_s, self.noise)
        if not all(value >= 0 for value in times):
            raise ValueError(f"forward_s, backward_s, optimizer_s, noise are {times}: 0 or more")
        if not self.buckets or min(self.buckets) < 0:
            raise ValueError(f"buckets={self.buckets} must be one size or more, none negative")

    @property
    def compute_s(self) -> float:
        """Seconds of one rank alone."""
        return self.forward_s + self.backward_s + self.optimizer_s

    def transfers_s(self, n: int) -> list[float]:
        """Seconds of each bucket's all-reduce among n ranks."""
        by_size = {nbytes: ring_all_reduce_s(nbytes, n, self.link) for nbytes in set(self.buckets)}
        return [by_size[nbytes] for nbytes in self.buckets]

    def slowest(self, n: int) -> float:
        """How many times as long as one rank's the compute of the slowest of n is, on average."""
        return 1 + self.noise * sum(1 / k for k in range(2, n + 1))

    def step_s(self, n: int) -> float:
        """Seconds with overlap: the slowest rank's compute, and what its backward does not hide."""
        return self.slowest(n) * self.compute_s + self.exposed_s(n)

    def exposed_s(self, n: int) -> float:
        """Seconds from the end of the slowest backward to that of the last all-reduce."""
        backward_s = self.slowest(n) * self.backward_s
        total, sent, ready_s = sum(self.buckets) or 1.0, 0.0, []
        for nbytes in self.buckets:
            sent += nbytes
            ready_s.append(backward_s * sent / total)
        return max(0.0, pipelined_s(ready_s, self.transfers_s(n)) - backward_s)

    def unoverlapped_s(self, n: int) -> float:
        """Seconds when everything is sent after backward: F + B + C + O."""
        return self.slowest(n) * self.compute_s + sum(self.transfers_s(n))

    def bound_s(self, n: int) -> float:
        """Seconds of perfect overlap, F + max(B, C) + O: no order of events can be faster."""
        slowest = self.slowest(n)
        rest_s = slowest * (self.forward_s + self.optimizer_s)
        return rest_s + max(slowest * self.backward_s, sum(self.transfers_s(n)))


def fit_scaling(
    step: DataParallelStep, ranks: Sequence[int], seconds: Sequence[float]
) -> DataParallelStep:
    """The step with the bandwidth and the noise that fit measured seconds on these counts of ranks.

    Two constants, by least squares of the relative error; latency stays that of `step.link`. Of a
    wire that compute hides, any bandwidth fits, and a large one may be returned. Raises ValueError
    for fewer than 2 points above 1 rank.
    """
    points = [(n, t) for n, t in zip(ranks, seconds, strict=True) if n > 1]
    if len(points) < 2 or not all(t > 0 for _, t in points):
        raise ValueError(f"need positive times on 2 counts of ranks above 1 or more, got {points}")

    def tried(log_bandwidth: float, noise: float) -> DataParallelStep:
        return replace(step, link=Link(step.link.latency_s, 10**log_bandwidth), noise=noise)

    def error(fitted: DataParallelStep) -> float:
        return sum((fitted.step_s(n) / t - 1) ** 2 for n, t in points)

    def best_noise(log_bandwidth: float) -> float:
        return _least(lambda noise: error(tried(log_bandwidth, noise)), 0.0, MOST_NOISE, 16)

    lowest = math.log10(sum(step.buckets) / max(t for _, t in points) / 2)
    log_bandwidth = _least(lambda x: error(tried(x, best_noise(x))), lowest, lowest + 3, 60)
    return tried(log_bandwidth, best_noise(log_bandwidth))


def _least(error: Callable[[float], float], low: float, high: float, intervals: int) -> float:
    """Where the error is least: the best point of a grid, then sections around it."""
    width = (high - low) / intervals
    best = min((error(low + i * width), low + i * width) for i in range(intervals + 1))
    for _ in range(SECTIONS):
        width /= 2
        nearby = (max(low, best[1] - width), min(high, best[1] + width))
        best = min(best, *((error(x), x) for x in nearby))
    return best[1]
