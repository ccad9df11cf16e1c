"""tools.environment and tools/setup.sh: a set-up from any state, which says what it does.

No package is installed here: `install` is replaced where a set-up would come to it.
"""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
import venv as stdlib_venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import environment
from tools.environment import SetupError

ROOT = Path(__file__).resolve().parents[1]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout, in a folder with a space."""
    folder = tmp_path / "a course"
    folder.mkdir()
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """New environments hold no pip: nothing is installed into them."""
    monkeypatch.setattr(environment, "MAKE", [*environment.MAKE, "--without-pip"])


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every import works."""
    monkeypatch.setattr(environment, "does_not_import", lambda venv, root: None)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where something was installed; it always succeeds."""
    places: list[Path] = []

    def install(venv: Path, root: Path, index: str) -> None:
        places.append(venv)

    monkeypatch.setattr(environment, "install", install)
    return places


def empty_environment(folder: Path) -> Path:
    stdlib_venv.create(folder, with_pip=False)
    return folder


def ready_environment(root: Path, index: str = "") -> Path:
    venv = empty_environment(root / ".venv")
    (venv / environment.STAMP).write_text(f"{environment.fingerprint(root)}\n{index}\n")
    return venv


def test_a_ready_environment_is_left_alone(
    root: Path, healthy: None, installed: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    environment.ready(ready_environment(root), root, None, "")
    assert installed == []
    assert capsys.readouterr().out == ""


def test_a_fresh_checkout_gets_an_environment(
    root: Path, healthy: None, installed: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    venv = root / ".venv"
    environment.ready(venv, root, None, "")
    assert installed == [venv]
    assert environment.version(environment.interpreter(venv)) == HERE
    assert "there is none yet" in capsys.readouterr().out
    assert environment.must_install(venv, root) is None


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_change_of_what_is_asked_for_installs_again(
    root: Path, healthy: None, installed: list[Path], name: str
) -> None:
    venv = ready_environment(root)
    (root / name).write_text("something else")
    environment.ready(venv, root, None, "")
    environment.ready(venv, root, None, "")
    assert installed == [venv]


def test_a_half_made_environment_is_mended_in_place(
    root: Path, healthy: None, installed: list[Path]
) -> None:
    venv = ready_environment(root)
    (venv / environment.STAMP).unlink()
    (venv / "mark").touch()
    environment.ready(venv, root, None, "")
    assert installed == [venv]
    assert (venv / "mark").exists()


def dangling(venv: Path) -> None:
    for path in (venv / "bin").iterdir():
        path.unlink()
    (venv / "bin/python").symlink_to("/no/such/python")


def without_bin(venv: Path) -> None:
    for path in (venv / "bin").iterdir():
        path.unlink()


def not_executable(venv: Path) -> None:
    python = environment.interpreter(venv)
    python.unlink()
    python.write_text("#!/no/such/program\n")


@pytest.mark.parametrize("damage", [dangling, without_bin, not_executable])
def test_a_python_that_does_not_start_means_a_new_environment(
    root: Path,
    healthy: None,
    installed: list[Path],
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
) -> None:
    venv = ready_environment(root)
    damage(venv)
    environment.ready(venv, root, None, "")
    assert installed == [venv]
    assert environment.version(environment.interpreter(venv)) == HERE
    assert "its Python does not start" in capsys.readouterr().out


def test_what_cannot_be_mended_is_made_anew(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = ready_environment(root)
    (venv / "mark").touch()
    results = iter(["torch does not import", None])
    monkeypatch.setattr(environment, "does_not_import", lambda venv, root: "torch does not import")
    monkeypatch.setattr(environment, "install", lambda venv, root, index: next(results))
    environment.ready(venv, root, None, "")
    assert not (venv / "mark").exists()
    assert next(results, "used up") == "used up"


def test_without_a_network_a_working_environment_survives(
    root: Path, healthy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = ready_environment(root)
    (root / "constraints.txt").write_text("something else")
    (venv / "mark").touch()
    monkeypatch.setattr(environment, "install", lambda venv, root, index: "pip: no network")
    with pytest.raises(SetupError, match=r"no network.*stays as it was"):
        environment.ready(venv, root, None, "")
    assert (venv / "mark").exists()


def test_a_failed_set_up_is_not_taken_for_a_finished_one(
    root: Path, healthy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = root / ".venv"
    monkeypatch.setattr(environment, "install", lambda venv, root, index: "pip: no network")
    with pytest.raises(SetupError, match="no network"):
        environment.ready(venv, root, None, "")
    assert environment.must_install(venv, root) == "its set-up was not finished"


def test_another_python_or_index_means_a_new_environment(root: Path) -> None:
    venv = ready_environment(root, index="cpu")
    assert environment.must_start_over(venv, None, "") is None
    assert environment.must_start_over(venv, HERE, "cpu") is None
    assert "3.99 is asked for" in (environment.must_start_over(venv, "3.99", "") or "")
    assert "cpu, not from cu126" in (environment.must_start_over(venv, None, "cu126") or "")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_no_environment_is_never_removed(
    root: Path, installed: list[Path], kind: str
) -> None:
    venv = root / "thesis"
    if kind == "folder":
        venv.mkdir()
        (venv / "chapter.tex").touch()
    else:
        venv.touch()
    with pytest.raises(SetupError, match="is no environment"):
        environment.ready(venv, root, None, "")
    assert venv.exists()
    assert installed == []


def test_a_read_only_checkout_is_told_what_to_do(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("builtins.open", refuse)
    with (
        pytest.raises(SetupError, match=r"Read-only file system\. Copy the checkout"),
        environment.locked(root / ".venv"),
    ):
        pass


def test_an_environment_of_another_checkout_is_noticed(root: Path) -> None:
    """A copied checkout brings a .venv along whose pdt is still the old one."""
    venv = empty_environment(root / ".venv")
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "torch.py").write_text("zeros = abs")
    (site / "cloudpickle.py").write_text("dumps = abs")
    elsewhere = root.parent / "old checkout"
    for folder in (elsewhere, root):
        (folder / "pdt").mkdir(parents=True)
        (folder / "pdt/__init__.py").touch()
    (site / "pdt.pth").write_text(f"{elsewhere}\n")
    assert "another checkout" in (environment.does_not_import(venv, root) or "")
    (site / "pdt.pth").write_text(f"{root}\n")
    assert environment.does_not_import(venv, root) is None
    (site / "torch.py").write_text("raise ImportError('libtorch is half there')")
    assert "half there" in (environment.does_not_import(venv, root) or "")
    (site / "torch.py").write_text("")
    assert "no attribute 'zeros'" in (environment.does_not_import(venv, root) or "")


def fake_python(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def run_setup(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """tools/setup.sh with a path on which only the Pythons in `bin` are."""
    fake_python(tmp_path / "bin", "dirname", 'exec /usr/bin/dirname "$@"')
    environment_ = {"PATH": str(tmp_path / "bin"), **variables}
    command = ["/bin/sh", str(ROOT / "tools/setup.sh")]
    return subprocess.run(command, env=environment_, capture_output=True, text=True, timeout=30)


REAL = f'case "$1" in -m) echo "$0 $*";; *) exec {shlex.quote(sys.executable)} "$@";; esac'


def test_the_newest_tested_python_is_taken(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3", REAL)
    fake_python(tmp_path / "bin", "python3.12", REAL)
    done = run_setup(tmp_path)
    assert done.stdout.strip().endswith("/python3.12 -m tools.environment")


def test_old_and_incomplete_pythons_are_passed_over(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3.13", "exit 1")
    fake_python(tmp_path / "bin", "python3.12", 'case "$2" in *ensurepip*) exit 1;; esac')
    fake_python(tmp_path / "bin", "python3", REAL)
    assert run_setup(tmp_path).stdout.strip().endswith("/python3 -m tools.environment")


def test_a_python_without_venv_is_told_what_to_install(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3.12", 'case "$2" in *ensurepip*) exit 1;; esac')
    done = run_setup(tmp_path)
    assert done.returncode == 1
    assert "python3.12 has no venv module" in done.stderr


def test_no_python_at_all_is_said(tmp_path: Path) -> None:
    done = run_setup(tmp_path)
    assert done.returncode == 1
    assert "no Python of 3.11 or newer" in done.stderr


def test_the_python_that_was_named_is_taken_or_refused(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3", REAL)
    fake_python(tmp_path / "my python", "py", REAL)
    done = run_setup(tmp_path, PYTHON=str(tmp_path / "my python/py"))
    assert done.stdout.strip().endswith("my python/py -m tools.environment")
    refused = run_setup(tmp_path, PYTHON="/no/such/python")
    assert refused.returncode == 1
    assert "PYTHON=/no/such/python does not start" in refused.stderr
