"""Cuts of the graph of a training step, held to what ZeRO-Offload's section 3 and Table 1 say."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdt.plan.placement import (
    EDGES,
    NODES,
    best_placement,
    bus_nbytes,
    device_nbytes,
    placements,
)

DATA = json.loads((Path(__file__).parent / "data" / "zero_offload.json").read_text())
TABLE_1 = DATA["table1"]
ALL = list(placements(NODES))
COMPUTING = [on for on in ALL if "forward-backward" in on]  # the host is too slow to compute
SUMS = st.integers(0, 99)


def placement_of(row: dict[str, str]) -> frozenset[str]:
    return frozenset(name for name in NODES if row[name] == "gpu")


def test_there_are_sixteen_placements_each_once() -> None:
    assert len(ALL) == len(set(ALL)) == 16


@pytest.mark.parametrize("row", TABLE_1)
def test_table_1_of_zero_offload_but_for_its_last_memory(row: dict[str, str]) -> None:
    on_device = placement_of(row)
    nbytes = device_nbytes(on_device, NODES)
    is_misprinted = row is TABLE_1[-1]  # it says 8 times less, and 4M
    assert row["memory"] == ("4M" if is_misprinted else f"{nbytes}M")
    assert round(16 / nbytes, 2) == row["reduction"]
    assert bus_nbytes(on_device, EDGES) == (0 if len(on_device) == 4 else 4)


def test_every_other_cut_with_the_computation_on_the_device_costs_half_as_much_again() -> None:
    others = [on for on in COMPUTING if on not in [placement_of(row) for row in TABLE_1]]
    assert len(others) == 4
    assert min(bus_nbytes(on, EDGES) for on in others) == 6


def test_zero_offloads_placement_is_the_only_one_of_least_memory_at_least_traffic() -> None:
    saving = [on for on in COMPUTING if device_nbytes(on, NODES) < 16]
    least = min(bus_nbytes(on, EDGES) for on in saving)
    cheap = [on for on in saving if bus_nbytes(on, EDGES) == least]
    smallest = min(device_nbytes(on, NODES) for on in cheap)
    found = [on for on in cheap if device_nbytes(on, NODES) == smallest]
    assert (least, smallest, found) == (4, 2, [frozenset({"forward-backward", "p16"})])
    for budget in (2, 3):
        assert best_placement(NODES, EDGES, {"forward-backward"}, budget) == found[0]
    assert best_placement(NODES, EDGES, {"forward-backward"}, 16) == frozenset(NODES)


@given(st.lists(SUMS, min_size=1, max_size=6), st.data())
def test_a_cut_costs_the_same_from_either_side(memory: list[int], data: st.DataObject) -> None:
    names = [f"n{i}" for i in range(len(memory))]
    edges = {pair: data.draw(SUMS) for pair in pairwise(names)}
    for on_device in placements(names):
        others = frozenset(names) - on_device
        assert bus_nbytes(on_device, edges) == bus_nbytes(others, edges)


def test_no_room_for_what_must_be_on_the_device_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match=r"budget=1: \['p16'\] alone"):
        best_placement(NODES, EDGES, {"p16"}, 1)
