"""ZeRO-Infinity's equations, held to its Figure 2a and to what section 4 says of bandwidths."""

import json
from decimal import ROUND_HALF_UP, Decimal
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdt.grade.walk_time import simulate
from pdt.plan.infinity import (
    activation_working_nbytes,
    ait_of_checkpoints,
    ait_of_parameters,
    ait_of_states,
    checkpoints_nbytes,
    efficiency,
    item_s,
    layers_numel,
    model_working_nbytes,
    needed_bandwidth,
    states_nbytes,
    walk_s,
)

DATA = json.loads((Path(__file__).parent / "data" / "zero_infinity.json").read_text())
ROWS = [dict(zip(DATA["columns"], row, strict=True)) for row in DATA["rows"]]
MEASURED = ["parameters", *DATA["columns"][4:]]
CELLS = [(row, column) for row in ROWS for column in MEASURED]
V100, SECONDS = 70e12, st.floats(0.0, 100.0)


def formula(row: dict, column: str) -> float:
    """A cell of Figure 2a in its unit."""
    layers, hidden, heads = row["layers"], 1024 * row["hidden_k"], row["heads"]
    return {
        "parameters": layers_numel(layers, hidden) / 1e12,
        "states": states_nbytes(layers, hidden) / 2**40,
        "activations": layers * activation_working_nbytes(32, 1024, hidden, heads) / 2**40,
        "checkpoints": checkpoints_nbytes(32, 1024, layers, hidden) / 2**40,
        "model_working": model_working_nbytes(hidden) / 2**30,
        "activation_working": activation_working_nbytes(2, 1024, hidden, heads) / 2**30,
    }[column]


def printed_as(value: float, like: str) -> str:
    """The value with as many digits behind the point; halves go up, as in the figure."""
    return str(Decimal(value).quantize(Decimal(like), ROUND_HALF_UP))


@pytest.mark.parametrize(("row", "column"), CELLS)
def test_figure_2a_to_the_last_digit_but_for_one_cell(row: dict, column: str) -> None:
    seen = printed_as(formula(row, column), row[column])
    if [row["parameters"], column] == DATA["misprinted"][:2]:
        assert seen == DATA["misprinted"][2] != row[column]
    else:
        assert seen == row[column]


def test_figure_2a_has_thirty_cells() -> None:
    assert len(CELLS) == 30


def test_the_bandwidths_that_section_4_asks_for() -> None:
    parameters, states = ait_of_parameters(1024, 1), ait_of_states(1024, 1)
    assert 0.50 < efficiency(parameters, 70e9, V100) < 0.51
    assert needed_bandwidth(states, 0.5, V100) == 4 * needed_bandwidth(parameters, 0.5, V100)
    for_90 = needed_bandwidth(ait_of_states(1024, 2), 0.9, V100)
    assert 1.2e12 < for_90 < 1.5e12
    assert 0.9 < efficiency(ait_of_states(1024, 2), 1.5e12, V100) < 0.92
    assert efficiency(ait_of_checkpoints(2048), 2e9, V100) > 0.5
    assert efficiency(ait_of_checkpoints(8192), 1e9, V100) > 0.7


def test_intensities_are_operations_over_bytes_carried() -> None:
    layers, hidden, batch_size, seq_len, interval = 10, 512, 3, 128, 2
    numel = layers_numel(layers, hidden)
    operations = 2 * 4 * batch_size * seq_len * numel  # equation 7
    # 2 bytes each: loaded for forward, for its second run and for backward, and the gradient.
    assert operations / (4 * 2 * numel) == ait_of_parameters(seq_len, batch_size)
    assert operations / (2 * 16 * numel) == ait_of_states(seq_len, batch_size)
    carried = 2 * checkpoints_nbytes(batch_size, seq_len, layers, hidden, interval)
    assert operations / carried == ait_of_checkpoints(hidden, interval)


@given(st.floats(1, 1e5), st.floats(0.01, 0.99), st.floats(1e9, 1e15))
def test_needed_bandwidth_is_efficiency_the_other_way_round(
    ait: float, share: float, peak: float
) -> None:
    assert efficiency(ait, needed_bandwidth(ait, share, peak), peak) == pytest.approx(share)


def test_nothing_reaches_all_of_a_peak() -> None:
    for share in (1.0, -0.1):
        with pytest.raises(ValueError, match=f"share={share}"):
            needed_bandwidth(1.0, share, 1.0)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=12))
def test_more_buffers_never_cost_time_and_one_is_the_sum(parts: list) -> None:
    totals = [walk_s(parts, k)[0] for k in range(1, 15)]
    assert totals[0] == pytest.approx(sum(map(sum, parts)))
    assert all(after <= before + 1e-9 for before, after in pairwise(totals))
    for lane in zip(*parts, strict=True):
        assert totals[-1] >= sum(lane) - 1e-9


@given(SECONDS, SECONDS, SECONDS, st.integers(1, 5))
def test_a_long_walk_takes_item_s_each(read_s: float, use_s: float, write_s: float, k: int) -> None:
    n = 60
    total, stall = walk_s([(read_s, use_s, write_s)] * n, k)
    each = item_s(read_s, use_s, write_s, k)
    assert n * each - 1e-6 <= total + k * each
    assert total <= n * each + read_s + use_s + write_s + 1e-6
    assert stall <= total - n * use_s + 1e-6


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), max_size=10), st.integers(1, 6))
def test_item_by_item_is_as_event_by_event(parts: list, k: int) -> None:
    assert walk_s(parts, k) == pytest.approx(simulate(parts, k))


def test_a_window_has_a_buffer() -> None:
    with pytest.raises(ValueError, match="num_buffers=0"):
        item_s(1.0, 1.0, 1.0, 0)
    with pytest.raises(ValueError, match="num_buffers=0"):
        walk_s([(1.0, 1.0, 1.0)], 0)
