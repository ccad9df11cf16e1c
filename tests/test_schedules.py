"""Pipeline schedules as data: they run, keep what they promise, and take what is published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdt.pipeline_parallel.order import check, in_flight
from pdt.pipeline_parallel.schedule import (
    Action,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from pdt.pipeline_parallel.simulate import Simulation, Times, simulate

PUBLISHED = json.loads((Path(__file__).parent / "data" / "zero_bubble.json").read_text())["rows"]
PLAIN: dict[str, Callable[[int, int], Schedule]] = {
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "ZB-H1": zb_h1,
    "ZB-H2": zb_h2,
}
CHUNKS = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}  # not printed: those that come closest

ROWS = pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            marks=pytest.mark.slow if row["num_ranks"] > 8 else (),
            id=f"{row['model']}-{row['num_microbatches']}",
        )
        for row in PUBLISHED
    ],
)
sizes = st.integers(1, 6), st.integers(1, 12)


def bubble(schedule: Schedule, row: dict[str, Any], chunks: int = 1) -> float:
    ms = row["times_ms"]
    parts = [ms[name] / chunks for name in ("forward", "input_grad", "weight_grad")]
    return simulate(schedule, Times(*parts, ms["transfer"])).bubble


@ROWS
@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZB-H2"])
def test_the_bubbles_are_those_of_table_5_to_four_decimals(name: str, row: dict[str, Any]) -> None:
    schedule = PLAIN[name](row["num_ranks"], row["num_microbatches"])
    assert round(bubble(schedule, row), 4) == row["bubbles"][name]


@ROWS
def test_the_interleaved_bubbles_come_within_0_35_points_of_table_5(row: dict[str, Any]) -> None:
    chunks = CHUNKS[row["model"]]
    schedule = interleaved(row["num_ranks"], row["num_microbatches"], chunks)
    assert bubble(schedule, row, chunks) == pytest.approx(row["bubbles"]["1F1B-I"], abs=0.0036)


@settings(deadline=None)
@given(*sizes, st.sampled_from(sorted(PLAIN)))
def test_every_schedule_can_be_run(p: int, m: int, name: str) -> None:
    check(PLAIN[name](p, m))


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_interleaved_schedules_can_be_run(p: int, groups: int, v: int) -> None:
    schedule = interleaved(p, groups * p, v)
    check(schedule)
    assert [schedule.place(schedule.stage(r, c)) for r in range(p) for c in range(v)] == [
        (r, c) for r in range(p) for c in range(v)
    ]


@settings(deadline=None)
@given(*sizes)
def test_ranks_keep_the_activations_that_the_papers_say(p: int, m: int) -> None:
    ranks = range(p)
    assert in_flight(gpipe(p, m)) == [m] * p
    assert in_flight(one_f_one_b(p, m)) == [min(p - r, m) for r in ranks]
    assert max(in_flight(zb_h1(p, m))) == min(p, m)
    assert max(in_flight(zb_h2(p, m))) == min(2 * p - 1, m)


def run(schedule: Schedule) -> Simulation:
    return simulate(schedule, Times(1.0, 1.0, 1.0))


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 4))
def test_bubbles_follow_the_closed_forms(p: int, more: int) -> None:
    m = 2 * p + more  # enough to come into a steady state
    busy_s = 3.0 * m
    assert run(gpipe(p, m)).step_s >= run(one_f_one_b(p, m)).step_s == busy_s + 3.0 * (p - 1)
    assert run(zb_h1(p, m)).step_s == pytest.approx(busy_s + (p - 1))  # F + I - W
    assert run(zb_h2(p, m)).step_s == pytest.approx(busy_s)  # F + I - 2 W


def test_more_chunks_divide_the_bubble() -> None:
    p, m = 4, 8
    for v in (1, 2, 4):
        found = simulate(interleaved(p, m, v), Times(1.0 / v, 1.0 / v, 1.0 / v))
        assert found.step_s - found.busy_s == pytest.approx(3.0 * (p - 1) / v)


def test_slow_transfers_cost_interleaving_the_most() -> None:
    p, m = 4, 16
    slow = 2.0
    plain = simulate(one_f_one_b(p, m), Times(1.0, 1.0, 1.0, slow)).bubble
    woven = simulate(interleaved(p, m, 4), Times(0.25, 0.25, 0.25, slow)).bubble
    assert woven > plain


def test_what_cannot_be_run_says_why() -> None:
    two = one_f_one_b(2, 2).actions
    backwards_first = Schedule((tuple(reversed(two[0])), two[1]), 2)
    with pytest.raises(ValueError, match=r"deadlocks: rank 0 waits to do B1; rank 1 waits .* F0"):
        check(backwards_first)
    with pytest.raises(ValueError, match=r"rank 1 takes micro-batch 1 through chunk 0 by .*'F': 1"):
        check(Schedule((two[0], two[1][:-1]), 2))
    with pytest.raises(ValueError, match="rank 0 does F7, which there is not"):
        check(Schedule(((Action("F", 7),), ()), 2))
    with pytest.raises(ValueError, match="num_microbatches=5 is not a multiple of num_ranks=2"):
        interleaved(2, 5, 2)
    with pytest.raises(ValueError, match="num_ranks=0"):
        gpipe(0, 1)
