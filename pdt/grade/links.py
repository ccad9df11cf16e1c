"""What lesson 03's exercises must do: fit a link, plan buckets, spare the slow wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pdt.comm.cost import Link, ring_all_reduce_s
from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial, Wrong
from pdt.grade.expect import expect, expect_close, expect_int
from pdt.grade.two_level import TWO_LEVEL

NOISE = 0.05  # standard deviation of the logarithm of a time
MAX_BUCKETS = 1000
MEASURED_BUCKETS = 40  # on the wire; more would take longer than the exercise may


def _pair(result: Any, names: str) -> tuple[Any, Any]:
    if type(result) is not tuple or len(result) != 2:
        raise Wrong(f"a tuple ({names})", f"{type(result).__name__} {result!r:.40}")
    return result


def _fit_trials(dice: Dice) -> Iterator[Trial]:
    """Fast and slow wires, sizes over five decades in any order; then no latency to be seen."""
    for latency_s, bandwidth in ((1e-5, 1e10), (2e-4, 1e9), (1e-3, 2e8), (2e-2, 1e7)):
        latency_s, bandwidth = latency_s * _factor(dice), bandwidth * _factor(dice)
        sizes = _sizes(dice, knee=latency_s * bandwidth)
        noise = (NOISE * dice.normal((len(sizes),), torch.float64)).exp().tolist()
        times = [(latency_s + s / bandwidth) * e for s, e in zip(sizes, noise, strict=True)]
        label = f"{latency_s:.2g} s, {bandwidth:.2g} B/s"
        yield Trial([(sizes, times, (latency_s, bandwidth))], label)
    sizes = _sizes(dice, knee=1e6)
    times = [s / 1e9 * (s / min(sizes)) ** 0.05 for s in sizes]  # large messages leave the cache
    yield Trial([(sizes, times, None)], "a wire without latency")


def _factor(dice: Dice) -> float:
    return dice.integer(100, 300) / 200


def _sizes(dice: Dice, knee: float, count: int = 41) -> list[int]:
    """Evenly spread over two and a half decades on both sides of the knee, shuffled."""
    sizes = [max(1, round(knee * 10 ** (5 * i / (count - 1) - 2.5))) for i in range(count)]
    for i in range(count - 1, 0, -1):
        j = dice.integer(0, i)
        sizes[i], sizes[j] = sizes[j], sizes[i]
    return sizes


def _drive_fit(fit_link: Callable[..., Any], sizes: list, times: list, _: Any) -> Any:
    return fit_link(sizes, times)


def _fits(run: Run, position: int, what: str) -> None:
    truth = run.inputs[0][2]
    if truth is not None:
        seen = _pair(run.ranks[0].result, "latency_s, bandwidth")[position]
        expect_close(seen, truth[position], 0.15, what)


def _not_negative(run: Run) -> None:
    latency_s, bandwidth = _pair(run.ranks[0].result, "latency_s, bandwidth")
    both = f"latency_s {latency_s!r:.20}, bandwidth {bandwidth!r:.20}"
    good = type(latency_s) in (int, float) and latency_s >= 0 and bandwidth > 0
    expect(good, "latency_s at least 0 and bandwidth above 0", both)


FIT_LINK = Exercise(
    name="fit_link",
    points=2,
    minutes=15,
    trials=_fit_trials,
    drive=_drive_fit,
    poison=("pdt.comm.cost.fit_alpha_beta",),
    properties=(
        Property(
            "finds the latency within 15 %",
            lambda run: _fits(run, 0, "latency_s"),
            "make the relative error small: divide each equation by its measured time.",
        ),
        Property(
            "finds the bandwidth within 15 %",
            lambda run: _fits(run, 1, "bandwidth"),
            "the slope is in seconds per byte; the bandwidth is one over it, in bytes per second.",
        ),
        Property(
            "never finds a negative constant",
            _not_negative,
            "when the best line starts below zero, the best allowed one starts at zero.",
        ),
    ),
)


def bucketed_step_s(buckets: int, nbytes: float, n: int, link: Link, backward_s: float) -> float:
    """A step whose bucket j is ready after j of `buckets` equal parts of backward.

    Either the wire never rests from the first bucket on, or all but the last bucket are hidden.
    """
    bucket_s = ring_all_reduce_s(nbytes / buckets, n, link)
    return max(backward_s / buckets + buckets * bucket_s, backward_s + bucket_s)


def _plan_trials(dice: Dice) -> Iterator[Trial]:
    """By formula: bound by the wire, by compute, by latency; then one on a wire, measured."""
    for n, mb, latency_ms, mb_per_s, backward_ms in (
        (1, 10, 1.0, 100, 50),
        (2, 100, 0.5, 1000, 100),
        (4, 400, 0.05, 1000, 200),
        (4, 80, 0.33, 1000, 200),
        (64, 25, 0.1, 10_000, 30),
        (512, 10, 1.0, 10_000, 20),
    ):
        nbytes = 4 * dice.integer(200_000 * mb, 300_000 * mb)
        args = nbytes, n, latency_ms / 1e3, mb_per_s * 1e6, backward_ms / 1e3
        yield Trial([(*args, False)], f"{n} ranks in the formula")
    for n in (2, 3):
        link = Link(3e-3 * n, 8e6)
        nbytes = 4 * dice.integer(150_000, 170_000)
        args = nbytes, n, link.latency_s, link.bandwidth, 0.1
        yield Trial([(*args, True)] * n, "on an emulated wire", link=link)


def _plan_and_run(
    plan_buckets: Callable[..., Any],
    nbytes: int,
    n: int,
    latency_s: float,
    bandwidth: float,
    backward_s: float,
    measure: bool,
) -> Any:
    """The plan and, where there is a wire, the least time of a few steps that follow it."""
    plan = plan_buckets(nbytes, n, Link(latency_s, bandwidth), backward_s)
    buckets = plan[0] if type(plan) is tuple and plan else None
    if not measure or type(buckets) is not int or not 1 <= buckets <= MEASURED_BUCKETS:
        return plan, None
    pieces = torch.zeros(nbytes // 4).tensor_split(buckets)
    return plan, min(_step_s(pieces, backward_s) for _ in range(5))


def _step_s(pieces: Sequence[torch.Tensor], backward_s: float) -> float:
    """Seconds of one step: backward sleeps, and each piece leaves when its part is over."""
    dist.barrier()
    start_s = time.perf_counter()
    works = []
    for j, piece in enumerate(pieces, start=1):
        ready_s = start_s + backward_s * j / len(pieces)
        time.sleep(max(0.0, ready_s - time.perf_counter()))
        works.append(dist.all_reduce(piece, async_op=True))
    for work in works:
        work.wait()
    return time.perf_counter() - start_s


def _plan(run: Run) -> tuple[Any, Any]:
    return _pair(run.ranks[0].result[0], "buckets, step_s")


def _law(run: Run) -> Callable[[int], float]:
    nbytes, n, latency_s, bandwidth, backward_s, _ = run.inputs[0]
    link = Link(latency_s, bandwidth)
    return lambda buckets: bucketed_step_s(buckets, nbytes, n, link, backward_s)


def _plans_best(run: Run) -> None:
    law, buckets = _law(run), _plan(run)[0]
    expect_int(buckets, buckets if type(buckets) is int else 0, "the number of buckets")
    expect(1 <= buckets <= MAX_BUCKETS, f"1 to {MAX_BUCKETS} buckets", buckets)
    best = min(range(1, MAX_BUCKETS + 1), key=law)
    near = law(buckets) <= 1.005 * law(best)
    expected = f"{best} buckets: {1e3 * law(best):.4g} ms"
    expect(near, expected, f"{buckets} buckets: {1e3 * law(buckets):.4g} ms")


def _predicts_time(run: Run) -> None:
    buckets, step_s = _plan(run)
    expect_close(step_s, _law(run)(buckets), 0.005, f"step_s with {buckets} buckets")


def _predicts_wire(run: Run) -> None:
    if not run.inputs[0][-1]:
        return
    buckets, step_s = _plan(run)
    measured_s = [seen.result[1] for seen in run.ranks]
    few = f"1 to {MEASURED_BUCKETS} buckets on this wire"
    expect(all(s is not None for s in measured_s), few, f"{buckets} buckets")
    expect_close(step_s, min(measured_s), 0.25, "step_s, as measured on the wire,")


PLAN_BUCKETS = Exercise(
    name="plan_buckets",
    points=3,
    minutes=20,
    trials=_plan_trials,
    drive=_plan_and_run,
    properties=(
        Property(
            "finds the best number of buckets",
            _plans_best,
            "try each number from 1 to 1000 in the model of the step, and keep the fastest.",
        ),
        Property(
            "predicts the step's time by the model",
            _predicts_time,
            "a bucket starts when it is ready and the wire is free; each pays 2(n-1) latencies.",
        ),
        Property(
            "predicts what the emulated wire takes, within 25 %",
            _predicts_wire,
            "run a step of your own on pdt.Ranks(2, link=...) and compare it bucket by bucket.",
        ),
    ),
)

EXERCISES = (FIT_LINK, PLAN_BUCKETS, TWO_LEVEL)
