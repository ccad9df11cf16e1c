"""pdt.ranks.doctor: what is missing comes with its cost and its fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdt.ranks import capacity, doctor, probes
from pdt.ranks.probes import Finding

ROOT = Path(__file__).resolve().parents[1]


def finding(ok: bool, essential: bool = False) -> Finding:
    return Finding("thing", ok, "seen", "its cost", "its fix", essential)


def test_what_is_missing_comes_with_its_cost_and_its_fix() -> None:
    text = doctor.report([finding(ok=False)])
    assert "its cost" in text
    assert "its fix" in text
    assert "its cost" not in doctor.report([finding(ok=True)])


def test_the_verdict_tells_essential_things_from_others() -> None:
    assert doctor.verdict([finding(ok=True)]) == "Everything in the course runs here."
    assert doctor.verdict([finding(ok=False)]) == "The lessons run here, without: thing."
    assert "No lesson runs" in doctor.verdict([finding(ok=False, essential=True)])


@pytest.mark.parametrize(
    ("found", "status"),
    [(finding(False, essential=True), 1), (finding(False), 0), (finding(True), 0)],
)
def test_only_what_is_essential_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, found: Finding, status: int
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda checkout: [found])
    assert doctor.main([]) == status


def test_every_missing_thing_has_a_cost_and_a_fix(tmp_path: Path) -> None:
    for each in doctor.examine(tmp_path):
        assert each.ok or (each.costs and each.fix), each


def test_the_machine_that_runs_this_test_can_run_the_lessons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor.main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    names = {row["name"] for row in rows}
    assert {"Python", "torch", "CPU cores", "memory", "GPUs", "shared memory"} <= names
    assert {"file descriptors", "namespaces and tc", "checkout", "loopback"} <= names


@pytest.mark.parametrize(("version", "ok"), [((3, 10), False), ((3, 11), True), ((3, 14), True)])
def test_an_old_python_is_refused(version: tuple[int, int], ok: bool) -> None:
    found = probes.python(version)
    assert found.ok is ok
    assert ("newer than any tested" in found.value) == (version > (3, 13))


def test_a_missing_package_is_named() -> None:
    found = probes.packages("notebooks", ("json", "no_such_package"), "no notebooks")
    assert not found.ok
    assert found.value == "without no_such_package"


def test_a_quota_below_two_cores_counts_more_than_the_cores() -> None:
    assert probes.cores(8, None).ok
    assert not probes.cores(8, 1.5).ok
    assert not probes.cores(1, None).ok


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_container_limit_is_read(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert probes.cpu_quota(tmp_path) == quota


def test_too_little_memory_for_a_lesson_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    three = capacity.SPARE_NBYTES + 3 * capacity.RANK_NBYTES
    monkeypatch.setattr(capacity, "available_nbytes", lambda: three)
    found = probes.memory()
    assert not found.ok
    assert "carries about 3 idle ranks" in found.value
    monkeypatch.setattr(capacity, "available_nbytes", lambda: 10)
    assert "carries about 0 idle ranks" in probes.memory().value


def test_without_memfd_the_fallback_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError("not allowed")

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    found = probes.shared_memory()
    assert not found.ok
    assert "temporary file" in found.costs


def test_looking_leaves_no_descriptor_open(tmp_path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    list(doctor.examine(tmp_path))  # torch opens what it keeps
    before = count()
    list(doctor.examine(tmp_path))
    assert count() == before


def test_a_long_temporary_path_is_noticed_before_the_fork_server_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    found = probes.temporary_folder()
    assert not found.ok
    assert found.essential
    assert "TMPDIR" in found.fix


def test_few_descriptors_come_with_the_command() -> None:
    found = probes.descriptors(256)
    assert not found.ok
    assert "ulimit -n" in found.fix
    assert probes.descriptors(None).ok


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = probes.namespaces()
    assert not found.ok
    assert found.value == "no unshare, ip, tc"
    assert not probes.compiler().ok


def test_a_compiler_is_found_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probes.compiler().value == str(tmp_path / "gcc")


def test_a_checkout_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    assert probes.writable(tmp_path).ok
    assert not probes.writable(tmp_path / "not there").ok


def test_the_doctor_answers_where_torch_is_missing() -> None:
    hide = "import sys; sys.modules['torch'] = None; from pdt.ranks import doctor; "
    command = [sys.executable, "-c", hide + "sys.exit(doctor.main([]))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "No lesson runs here until this is mended: torch." in done.stdout
