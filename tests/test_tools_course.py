"""tools.course and tools.gpu: what `make course` opens, and what `make gpu` runs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import course, gpu

ROOT = Path(__file__).resolve().parents[1]


def test_a_port_in_use_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        found = course.free_port(taken, taken)
    assert found not in (0, taken)


@pytest.mark.parametrize(
    ("environment", "platform", "seen"),
    [
        ({}, "linux", False),
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({}, "darwin", True),
        ({"SSH_CONNECTION": "a 1 b 2"}, "darwin", False),
        ({"SSH_CONNECTION": "a 1 b 2", "DISPLAY": "localhost:10.0"}, "linux", True),
    ],
)
def test_a_browser_is_opened_only_where_it_is_seen(
    environment: dict[str, str], platform: str, seen: bool
) -> None:
    assert course.has_display(environment, platform) is seen


def test_the_directions_name_the_host_that_ssh_reached() -> None:
    connection = {"SSH_CONNECTION": "10.0.0.9 5000 10.0.0.7 22"}
    text = course.directions(8889, "secret", "notebooks/00_ranks.ipynb", connection)
    assert "http://127.0.0.1:8889/lab/tree/notebooks/00_ranks.ipynb?token=secret" in text
    assert re.search(r"ssh -L 8889:127\.0\.0\.1:8889 \S+@10\.0\.0\.7", text)


def test_a_lesson_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SystemExit) as exit_:
        course.main(["77"])
    assert exit_.value.code == 2


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    """The course, started without a display; ended with the test."""
    environment = {name: value for name, value in os.environ.items() if "DISPLAY" not in name}
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.course"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)


def get(address: str, deadline: float) -> str:
    """What the address answers, as soon as it does."""
    while True:
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@pytest.mark.slow
def test_without_a_display_the_printed_address_answers(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    links = (re.search(r"(http://\S+)\?token=(\w+)", line) for line in server.stdout)
    page, token = next(link.groups() for link in links if link)
    start = page.split("/lab/")[0]
    deadline = time.monotonic() + 60
    file = f"{start}/api/contents/notebooks/00_ranks.ipynb"
    lesson = json.loads(get(f"{file}?token={token}", deadline))
    assert lesson["type"] == "notebook"
    assert "JupyterLab" in get(f"{page}?token={token}", deadline)
    with pytest.raises(urllib.error.HTTPError):  # nobody enters without the token
        get(file, deadline)


def test_only_files_with_gpu_tests_are_collected(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("@pytest.mark.gpu\ndef test_x(): ...")
    (tmp_path / "test_b.py").write_text("import hypothesis")
    assert gpu.files(tmp_path) == [str(tmp_path / "test_a.py")]


def test_a_machine_without_a_gpu_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        assert gpu.missing() is None
        return
    assert gpu.main([]) == 1
    assert "sees no CUDA device" in capsys.readouterr().err


def test_jupyterlab_is_kept_from_asking_and_settings_that_exist_stay(tmp_path: Path) -> None:
    settings = tmp_path / "share/jupyter/lab/settings/overrides.json"
    course.ask_no_questions(tmp_path)
    assert json.loads(settings.read_text())[course.NOTIFICATIONS]["fetchNews"] == "false"
    settings.write_text("{}")
    course.ask_no_questions(tmp_path)
    assert settings.read_text() == "{}"
    course.ask_no_questions(settings)  # a file, where no folder can be made
