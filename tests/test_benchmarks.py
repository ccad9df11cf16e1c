"""benchmarks/_common: a result says where and when it was taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import _common


def test_results_carry_the_machine_and_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_common, "RESULTS", tmp_path / "results")
    path = _common.write_results("meter", [{"nbytes": 4, "time_s": 0.5}], repeats=5)
    content = json.loads(path.read_text())
    assert path.name == "meter.json"
    assert content["rows"] == [{"nbytes": 4, "time_s": 0.5}]
    assert content["repeats"] == 5
    known = content["machine"]
    assert known["cores"] >= 1
    assert known["memory_gib"] > 0
    assert all(known[key] for key in ("cpu", "python", "torch", "commit", "date"))


def test_a_table_has_a_column_for_every_key() -> None:
    text = _common.table([{"op": "send", "time_s": 0.123456}, {"op": "recv", "ranks": 4}])
    head, _, first, second = text.splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == ["op", "time_s", "ranks"]
    assert "0.1235" in first
    assert "4" in second
