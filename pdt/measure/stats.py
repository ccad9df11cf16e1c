"""Honest figures from few timings: medians with their spread, and ratios of paired runs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Summary:
    """The median of `count` values and their 10th and 90th percentile."""

    median: float
    low: float
    high: float
    count: int

    @property
    def spread(self) -> float:
        """Width of the middle 80 % as a part of the median; 0 for a median of 0."""
        return (self.high - self.low) / abs(self.median) if self.median else 0.0

    def __format__(self, spec: str) -> str:
        median, low, high = (format(x, spec) for x in (self.median, self.low, self.high))
        return f"{median} ({low} to {high})"

    def __str__(self) -> str:
        return format(self, ".3g")


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which `part` (0 to 1) of the values lie, interpolated between neighbours.

    Raises ValueError for no values, for NaN among them and for a part outside 0 to 1.
    """
    ordered = sorted(values)
    if not ordered or any(value != value for value in ordered):
        raise ValueError(f"values={list(values)} must be one number or more, without NaN")
    if not 0 <= part <= 1:
        raise ValueError(f"part={part} must lie between 0 and 1")
    position = part * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    fraction = position - below
    if fraction == 0 or ordered[below] == ordered[above]:
        return ordered[below]
    return ordered[below] * (1 - fraction) + ordered[above] * fraction


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    return quantile(values, 0.5)


def summary(values: Sequence[float]) -> Summary:
    """Median, 10th and 90th percentile of the values."""
    return Summary(quantile(values, 0.5), quantile(values, 0.1), quantile(values, 0.9), len(values))


def paired(a: Sequence[float], b: Sequence[float]) -> Summary:
    """The ratio a/b of runs that were made side by side, pair by pair.

    A slow moment of the machine strikes both runs of a pair, so the ratio of pairs is far steadier
    than the ratio of two medians. Raises ValueError for unequal lengths and for a zero in `b`.
    """
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} values and b has {len(b)}: pairs need as many of each")
    if any(value == 0 for value in b):
        raise ValueError(f"b={list(b)} holds a zero, which makes no ratio")
    return summary([x / y for x, y in zip(a, b, strict=True)])


def time_fn(
    fn: Callable[[], object],
    repeats: int = 5,
    warmup: int = 1,
    *,
    before: Callable[[], object] | None = None,
) -> list[float]:
    """Seconds of each of `repeats` calls, after `warmup` calls that are not timed.

    `before` runs untimed ahead of every call (`dist.barrier`, so that ranks start together). Where
    CUDA is in use, the device is waited for on both sides of a call.
    """
    return interleave({"fn": fn}, repeats, warmup, before=before)["fn"]


def interleave(
    fns: Mapping[str, Callable[[], object]],
    repeats: int = 5,
    warmup: int = 1,
    *,
    before: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each call, timed in turn: A B A B ..., so that a drift strikes all alike.

    `paired(times["ours"], times["torch"])` is then a ratio within one run.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats={repeats} must be at least 1 and warmup={warmup} at least 0")
    times_s: dict[str, list[float]] = {name: [] for name in fns}
    for turn in range(warmup + repeats):
        for name, fn in fns.items():
            if before is not None:
                before()
            elapsed_s = _time_once(fn)
            if turn >= warmup:
                times_s[name].append(elapsed_s)
    return times_s


def _time_once(fn: Callable[[], object]) -> float:
    _wait_for_device()
    start_s = time.perf_counter()
    fn()
    _wait_for_device()
    return time.perf_counter() - start_s


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
