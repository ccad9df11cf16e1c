"""The README's figures are those of `benchmarks/results`, and what it names exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]


def line(words: str) -> str:
    return next(line for line in README.splitlines() if words in line)


def value(what: str, key: str) -> float:
    return next(row[key] for row in rows("ranks") if row["what"] == what)


def test_the_start_and_the_call_of_ranks_are_as_measured() -> None:
    start_s = value("warm start of 4 ranks", "median_s")
    ratio = value("spawn / warm start, 4 ranks", "ratio")
    assert f"{start_s:.2f} s, {ratio:.0f} times faster" in line("warm start")
    assert f"{1e3 * value('empty call on 4 ranks', 'median_s'):.1f} ms" in line("an empty call")


def test_shared_memory_s_figures_are_as_measured() -> None:
    faster = {
        (row["ranks"], row["nbytes"]): row["times faster"]
        for row in rows("shm")
        if row["op"] == "all_reduce"
    }
    for ranks in (2, 4):
        large = [faster[ranks, nbytes] for nbytes in (2**20, 2**23, 2**26)]
        said = f"{min(large):.1f} to {max(large):.1f}"
        assert said in line("all-reduce 1 to 64 MiB")
        assert f"{faster[ranks, 1024]:.1f}" in line("all-reduce of 1 KiB")


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_the_collectives_figures_are_as_measured(op: str) -> None:
    faster = {
        (row["ranks"], row["KiB"]): row["speed"]
        for row in rows("collectives")
        if row["operation"] == op and row["version"] == "direct"
    }
    for ranks in (2, 4):
        said = ", ".join(f"{faster[ranks, mib * 1024]:.1f}" for mib in (16, 32, 64))
        assert said in line(f"`collectives.{op}`")


def test_ddp_s_figures_are_as_measured() -> None:
    found = rows("ddp")
    by_model = {
        model: [row["pdt/torch"] for row in found if row["model"] == model]
        for model in ("large", "small", "device")
    }
    said = ", ".join(f"{median(ratios):.2f}" for ratios in by_model.values())
    assert f"{said} times as long by median" in line("a step with `pdt.ddp.DDP`")
    assert {len(ratios) for ratios in by_model.values()} == {16}
    (row,) = (
        row
        for row in found
        if (row["wire"], row["model"], row["cap_mib"]) == ("link 250 MB/s", "large", 1.0)
    )
    assert f"{row['overlap torch']:.0%} of what could be hidden" in line("its overlap on a link")
    assert f"| {row['overlap pdt']:.0%} |" in line("its overlap on a link")
    assert max(row["peak pdt/torch"] or 0.0 for row in found) == 1.0  # not counted on shm
    assert "no higher" in line("its peak memory")


@pytest.mark.parametrize(("stage", "name"), [(1, "Zero1"), (2, "Zero2"), (3, "fully_shard")])
def test_zero_s_figures_are_as_measured(stage: int, name: str) -> None:
    found = [row for row in rows("zero") if row["stage"] == stage]
    said = []
    for wire, place in (("gloo", "on gloo"), ("shm", "in shared memory"), ("link", "on a link")):
        faster = {
            (row["ranks"], row["model"]): 1 / row["pdt/torch"]
            for row in found
            if row["wire"].startswith(wire)
        }
        order = [(ranks, model) for ranks in (2, 4) for model in ("large", "small")]
        times = ", ".join(f"{faster[key]:.1f}" for key in order)
        said.append(f"{times}{' times as fast' if wire == 'gloo' else ''} {place}")
    assert "; ".join(said) in line(f"a step with `{name}`")
    assert all(row["held/formula"] == pytest.approx(1, abs=0.01) for row in found)


def test_the_peaks_of_stages_1_and_2_are_as_measured() -> None:
    peaks = [r["peak pdt/torch"] for r in rows("zero") if r["stage"] < 3 and r["wire"] == "gloo"]
    assert f"is {min(peaks):.1f} to {max(peaks):.1f} times torch's" in line("these runs")


def test_stage_3_s_peak_is_as_measured() -> None:
    peaks = {
        row["ranks"]: row["peak pdt/torch"]
        for row in rows("zero")
        if (row["stage"], row["wire"], row["model"]) == (3, "gloo", "large")
    }
    assert f"{peaks[2]:.2f} times on 2 ranks, {peaks[4]:.2f} times on 4" in line("memory on gloo")


def test_what_the_readme_links_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def span(values: list[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def test_the_host_s_adamw_is_as_measured() -> None:
    found = [row for row in rows("adam") if row["way"] == "one pass"]
    one, two = ([row for row in found if row["threads"] == n] for n in (1, 2))
    assert {row["numel"] for row in one} == {2**20, 2**22, 2**24, 2**26, 2**28}
    shares = [[row["share"] for row in some] for some in (one, two)]
    said = f"{span(shares[0], '.0%')} on 1 thread, {span(shares[1], '.0%')} on 2"
    assert said in line("`HostAdamW`'s pass")
    times = [[row["against it"] for row in some] for some in (one, two)]
    said = f"{span(times[0], '.2f')} times as long on 1 thread, {span(times[1], '.2f')} on 2"
    assert said in line("that pass, with a gradient scale")


def test_offloading_is_as_measured() -> None:
    found = {row["what"]: row for row in rows("offload")}
    waited, pieces, end = (
        found[f"step, {name}"]["step/bound"]
        for name in (
            "waited for in forward",
            "during backward, in pieces",
            "at the end, in one piece",
        )
    )
    said = line("a step with states on the host")
    assert f"{waited:.2f} times as long; {pieces:.2f} when the step waits" in said
    assert f"{end:.2f} with everything at its end" in said
    peaks = [found[f"memory, states in {place}"]["peak/formula"] for place in ("memory", "files")]
    assert f"| {peaks[0]:.2f}, {peaks[1]:.2f} times |" in line("memory of a process that trains so")
    assert all(peak == pytest.approx(1, abs=0.05) for peak in peaks)


def test_files_are_as_fast_as_measured() -> None:
    direct = [row for row in rows("nvme") if row["direct"]]
    write, read = (
        ", ".join(f"{row['times faster']:.1f}" for row in direct if row["what"] == what)
        for what in ("write", "read")
    )
    assert f"written {write} times as fast, read {read} |" in line("tensors of 1, 4, 16, 64 MiB")
