"""Medians, spreads and ratios of paired runs."""

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdt.measure import stats

numbers = st.floats(-1e6, 1e6)


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=20), st.floats(0, 1))
def test_quantiles_lie_within_the_values_and_agree_with_the_library(values, part):
    assert min(values) <= stats.quantile(values, part) <= max(values)
    assert stats.quantile(values, 0) == min(values)
    assert stats.quantile(values, 1) == max(values)
    assert stats.median(values) == pytest.approx(statistics.median(values), abs=1e-6)
    if len(values) > 1:
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        assert stats.quantile(values, 0.1) == pytest.approx(tenths[0], abs=1e-6)
        assert stats.quantile(values, 0.9) == pytest.approx(tenths[8], abs=1e-6)


def test_a_summary_shows_median_and_spread():
    figures = stats.summary([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (figures.median, figures.low, figures.high, figures.count) == (3, 1.4, 4.6, 5)
    assert figures.spread == pytest.approx(3.2 / 3)
    assert f"{figures:.1f}" == "3.0 (1.4 to 4.6)"
    assert stats.summary([0.0]).spread == 0


@settings(deadline=None)
@given(st.lists(st.floats(1, 2), min_size=3, max_size=9), st.floats(0.5, 2))
def test_a_ratio_of_pairs_is_blind_to_a_slow_moment(base, ratio):
    slow = [value * (100 if i % 2 else 1) for i, value in enumerate(base)]
    figures = stats.paired([value * ratio for value in slow], slow)
    assert figures.median == pytest.approx(ratio)
    assert figures.spread < 1e-9


def test_calls_alternate_and_warm_up_is_not_timed():
    calls = []
    times = stats.interleave(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        repeats=2,
        warmup=1,
        before=lambda: calls.append("-"),
    )
    assert calls == ["-", "a", "-", "b"] * 3
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2}
    assert all(seconds >= 0 for seconds in times["a"])
    assert len(stats.time_fn(lambda: None, repeats=4, warmup=0)) == 4


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: stats.median([]), "one number or more"),
        (lambda: stats.median([1.0, math.nan]), "without NaN"),
        (lambda: stats.quantile([1.0], 1.5), "between 0 and 1"),
        (lambda: stats.paired([1.0], [1.0, 2.0]), "a has 1 values and b has 2"),
        (lambda: stats.paired([1.0], [0.0]), "holds a zero"),
        (lambda: stats.time_fn(print, repeats=0), "repeats=0"),
    ],
)
def test_what_makes_no_figure_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
