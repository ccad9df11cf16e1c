"""What lesson 05's choice of a bucket cap must do: find the best, and predict its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from pdt.comm.cost import Link, ring_all_reduce_s
from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial, Wrong
from pdt.grade.expect import expect, expect_close, expect_int

REPEATS = 5


def split(param_nbytes: Sequence[int], cap: int) -> list[list[int]]:
    """Parameters by bucket, in order; a bucket is closed when it has reached the cap."""
    plan: list[list[int]] = [[]]
    filled = 0
    for i, nbytes in enumerate(param_nbytes):
        if filled >= cap and plan[-1]:
            plan.append([])
            filled = 0
        plan[-1].append(i)
        filled += nbytes
    return plan


def planned_s(
    param_nbytes: Sequence[int], ready_s: Sequence[float], n: int, link: Link, cap: int
) -> float:
    """When the last bucket has arrived; each waits for its last gradient and for the wire."""
    free_s = 0.0
    for bucket in split(param_nbytes, cap):
        nbytes = sum(param_nbytes[i] for i in bucket)
        free_s = max(free_s, ready_s[bucket[-1]]) + ring_all_reduce_s(nbytes, n, link)
    return free_s


def _sizes(dice: Dice, count: int, unit: int) -> list[int]:
    """Weights of very different sizes, in bytes of float32."""
    return [4 * dice.integer(unit // 20, unit) * dice.choice((1, 1, 1, 4)) for _ in range(count)]


def _ready(dice: Dice, count: int, backward_s: float) -> list[float]:
    """Steps of different length that add up to backward."""
    steps = [dice.integer(5, 20) for _ in range(count)]
    return [backward_s * done / sum(steps) for done in accumulate(steps)]


def _cap_trials(dice: Dice) -> Iterator[Trial]:
    """By formula: no wire, bound by the wire, by backward, by latency; then two wires, measured.

    The wire's time for all bytes is `wire` times backward, a latency `share` of backward.
    """
    for n, count, wire, share in (
        (1, 20, 1.0, 0.01),
        (2, 60, 1.0, 0.02),
        (4, 60, 2.0, 0.01),
        (8, 100, 0.5, 0.002),
        (64, 40, 0.2, 0.001),
    ):
        args = _args(dice, n, count, wire, share, backward_s=0.1, unit=2_000_000)
        yield Trial([(*args, False)], f"{n} ranks in the formula")
    for n, wire in ((2, 1.0), (3, 1.3)):
        args = _args(dice, n, 16, wire, 0.07 / n, backward_s=0.16, unit=30_000)
        link = Link(args[3], args[4])
        yield Trial([(*args, True)] * n, "on an emulated wire", link=link)


def _args(
    dice: Dice, n: int, count: int, wire: float, share: float, *, backward_s: float, unit: int
) -> tuple[Any, ...]:
    param_nbytes = _sizes(dice, count, unit)
    total = sum(param_nbytes)
    caps = [0, *(total >> k for k in (6, 5, 4, 3, 2, 1)), total]
    latency_s = share * backward_s
    bandwidth = 2 * (max(n, 2) - 1) / max(n, 2) * total / (wire * backward_s)
    return param_nbytes, _ready(dice, count, backward_s), n, latency_s, bandwidth, caps


def _choose_and_run(
    best_cap: Callable[..., Any],
    param_nbytes: list[int],
    ready_s: list[float],
    n: int,
    latency_s: float,
    bandwidth: float,
    caps: list[int],
    measure: bool,
) -> Any:
    """The choice and, where there is a wire, the least time of a few steps with it."""
    link = Link(latency_s, bandwidth)
    choice = best_cap(list(param_nbytes), list(ready_s), n, link, list(caps))
    cap = choice[0] if type(choice) is tuple and choice else None
    if not measure or type(cap) is not int or cap not in caps:
        return choice, None
    plan = split(param_nbytes, cap)
    flats = [torch.zeros(sum(param_nbytes[i] for i in bucket) // 4) for bucket in plan]
    leave_s = [ready_s[bucket[-1]] for bucket in plan]
    return choice, [_step_s(flats, leave_s) for _ in range(REPEATS)]


def _step_s(flats: Sequence[torch.Tensor], leave_s: Sequence[float]) -> float:
    """Seconds of one step: backward sleeps, and each bucket leaves when it is ready."""
    dist.barrier()
    start_s = time.perf_counter()
    works = []
    for flat, ready_s in zip(flats, leave_s, strict=True):
        time.sleep(max(0.0, start_s + ready_s - time.perf_counter()))
        works.append(dist.all_reduce(flat, async_op=True))
    for work in works:
        work.wait()
    return time.perf_counter() - start_s


def _choice(run: Run) -> tuple[int, Any]:
    choice = run.ranks[0].result[0]
    if type(choice) is not tuple or len(choice) != 2:
        raise Wrong("a tuple (cap, step_s)", f"{type(choice).__name__} {choice!r:.40}")
    expect_int(choice[0], choice[0] if type(choice[0]) is int else 0, "the cap")
    expect(choice[0] in run.inputs[0][5], "one of the caps given", choice[0])
    return choice


def _law(run: Run) -> Callable[[int], float]:
    param_nbytes, ready_s, n, latency_s, bandwidth, _, _ = run.inputs[0]
    link = Link(latency_s, bandwidth)
    return lambda cap: planned_s(param_nbytes, ready_s, n, link, cap)


def _is_best(run: Run) -> None:
    law, cap = _law(run), _choice(run)[0]
    best = min(run.inputs[0][5], key=law)
    expected = f"a cap of {best:,}: {1e3 * law(best):.4g} ms"
    near = law(cap) <= 1.005 * law(best)
    expect(near, expected, f"a cap of {cap:,}: {1e3 * law(cap):.4g} ms")


def _predicts_time(run: Run) -> None:
    cap, step_s = _choice(run)
    expect_close(step_s, _law(run)(cap), 0.005, f"step_s with a cap of {cap:,}")


def _predicts_wire(run: Run) -> None:
    """The fastest step, each as long as its slowest rank."""
    if not run.inputs[0][-1]:
        return
    step_s = _choice(run)[1]
    steps = zip(*(seen.result[1] for seen in run.ranks), strict=True)
    expect_close(step_s, min(map(max, steps)), 0.25, "step_s, as measured on the wire,")


BEST_CAP = Exercise(
    name="best_cap",
    points=3,
    minutes=20,
    trials=_cap_trials,
    drive=_choose_and_run,
    properties=(
        Property(
            "finds the best cap",
            _is_best,
            "compute the step's time for each cap that is offered, and keep the fastest.",
        ),
        Property(
            "predicts the step's time by the model",
            _predicts_time,
            "a bucket leaves when its last gradient is ready and the bucket before it is through.",
        ),
        Property(
            "predicts what the emulated wire takes, within 25 %",
            _predicts_wire,
            "all buckets share one wire, and each pays 2(n-1) latencies.",
        ),
    ),
)
