"""What lesson 05's exercises must do: assign parameters to buckets, count what is ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pdt.grade.best_cap import BEST_CAP
from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial, Wrong
from pdt.grade.expect import expect
from pdt.grade.ready_count import READY_COUNT

Spec = tuple[int, str]  # numel and dtype, or the position of an earlier one and "tied"
DTYPES = ("float32", "bfloat16", "float64")
ENDLESS = float("inf")


def _assign_trials(dice: Dice) -> Iterator[Trial]:
    """Plain and cruel models; caps from nothing to endless, some reached to the byte."""
    plain = [(dice.integer(1, 60), "float32") for _ in range(dice.integer(6, 12))]
    exact = [(10, "float32")] * 12  # 40 bytes each
    mixed = [(dice.integer(1, 60), dice.choice(DTYPES)) for _ in range(dice.integer(12, 20))]
    large = [(500, "float32"), *plain, (700, "float32")]
    tied = [*mixed, (0, "tied"), (40, "float32"), (2, "tied")]
    half, whole = dice.integer(60, 100), dice.integer(150, 300)
    for label, specs, cap, first in (
        ("one dtype", plain, whole, whole),
        ("a small first bucket", plain, whole, half),
        ("caps reached to the byte", exact, 120, 40),
        ("caps of 0", plain, 0, 0),
        ("endless caps", plain, ENDLESS, ENDLESS),
        ("parameters larger than the cap", large, whole, half),
        ("several dtypes", mixed, whole, half),
        ("several dtypes, endless caps", mixed, ENDLESS, ENDLESS),
        ("tied parameters", tied, whole, half),
        ("one parameter", plain[:1], whole, half),
    ):
        yield Trial([(specs, cap, first)], label)


def _params(specs: Sequence[Spec]) -> list[nn.Parameter]:
    params: list[nn.Parameter] = []
    for number, dtype in specs:
        if dtype == "tied":
            params.append(params[number])
        else:
            params.append(nn.Parameter(torch.zeros(number, dtype=getattr(torch, dtype))))
    return params


def _assign(
    learner: Callable[..., Any], specs: list[Spec], cap_nbytes: float, first_nbytes: float
) -> Any:
    return learner(_params(specs), cap_nbytes, first_nbytes)


def _plan(run: Run) -> list[list[int]]:
    plan, count = run.ranks[0].result, len(run.inputs[0][0])
    wanted = "a list of lists of positions (int)"
    if type(plan) is not list or any(type(bucket) is not list for bucket in plan):
        raise Wrong(wanted, f"{plan!r:.60}")
    positions = [i for bucket in plan for i in bucket]
    for i in positions:
        expect(type(i) is int and 0 <= i < count, f"{wanted} from 0 to {count - 1}", repr(i))
    return plan


def _each_once(run: Run) -> None:
    params = _params(run.inputs[0][0])
    seen = sorted(id(params[i]) for bucket in _plan(run) for i in bucket)
    distinct = {id(param): i for i, param in enumerate(params)}
    lacks = [i for key, i in distinct.items() if key not in seen]
    twice = [i for key, i in distinct.items() if seen.count(key) > 1]
    found = [f"without {lacks}"] * bool(lacks) + [f"more than once {twice}"] * bool(twice)
    text = "; ".join(found)
    expect(not text, f"each of {len(distinct)} parameters in one bucket", text)


def _one_dtype(run: Run) -> None:
    specs = run.inputs[0][0]
    params = _params(specs)
    for bucket in _plan(run):
        dtypes = sorted({str(params[i].dtype) for i in bucket})
        expect(len(dtypes) == 1, "one dtype in a bucket", f"{', '.join(dtypes)} in {bucket}")


def _is_sound(run: Run) -> bool:
    """Whether caps and order can be judged: each parameter once, one dtype in a bucket."""
    try:
        _each_once(run)
        _one_dtype(run)
    except Wrong:
        return False
    return True


def _by_caps(run: Run) -> None:
    """Sizes of the buckets of each dtype, in the order in which they are listed."""
    if not _is_sound(run):
        return
    specs, cap, first = run.inputs[0]
    params = _params(specs)
    counts: dict[torch.dtype, int] = {}
    lasts = {params[bucket[-1]].dtype: k for k, bucket in enumerate(_plan(run)) if bucket}
    for k, bucket in enumerate(_plan(run)):
        expect(bool(bucket), "no empty bucket", f"bucket {k} is empty")
        dtype, sizes = params[bucket[0]].dtype, [params[i].nbytes for i in bucket]
        number = counts[dtype] = counts.get(dtype, 0) + 1
        limit = first if number == 1 else cap
        what = f"bucket {k} ({str(dtype).removeprefix('torch.')}, cap {limit})"
        open_until = sum(sizes[:-1]) < limit or len(sizes) == 1
        expect(open_until, f"{what} closed at its cap", f"one more after {sum(sizes[:-1])} bytes")
        full = sum(sizes) >= limit or k == lasts[dtype]
        expect(full, f"{what} filled up to its cap", f"closed at {sum(sizes)} bytes")


def _in_order(run: Run) -> None:
    """Within each bucket, from bucket to bucket of a dtype, and of the buckets among each other.

    A tied parameter stands at its first position: only there is its gradient complete.
    """
    if not _is_sound(run):
        return
    specs = run.inputs[0][0]
    first_of = {i: (number if dtype == "tied" else i) for i, (number, dtype) in enumerate(specs)}
    plan = _plan(run)
    for bucket in plan:
        expect(all(first_of[i] == i for i in bucket), "first positions of tied ones", bucket)
    params = _params(specs)
    for dtype in {param.dtype for param in params}:
        own = [i for bucket in plan for i in bucket if params[i].dtype == dtype]
        expect(own == sorted(own, reverse=True), "the last parameter first", own)
    firsts = [bucket[0] for bucket in plan if bucket]
    expect(firsts == sorted(firsts, reverse=True), "buckets by their first parameter", firsts)


ASSIGN = Exercise(
    name="assign",
    points=3,
    minutes=20,
    trials=_assign_trials,
    drive=_assign,
    poison=("pdt.buckets.assign_buckets",),
    properties=(
        Property(
            "puts each parameter into one bucket, once",
            _each_once,
            "a tied parameter is one tensor at two positions: `is` tells, == does not.",
        ),
        Property(
            "keeps one dtype in a bucket",
            _one_dtype,
            "keep one open bucket for each dtype.",
        ),
        Property(
            "closes a bucket when it has reached its cap",
            _by_caps,
            "add the parameter, then compare: at cap or above, the bucket is closed. The first "
            "bucket of each dtype has a cap of its own.",
        ),
        Property(
            "follows the order of backward",
            _in_order,
            "go from the last parameter to the first, and list a bucket where it was opened.",
        ),
    ),
)

EXERCISES = (ASSIGN, READY_COUNT, BEST_CAP)
