"""Grading outside Jupyter: a verdict on every notebook, results for CI, no process left."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pdt import grade
from pdt.grade.command import grade_notebook

ROOT = Path(__file__).parents[1]
NAME = "02_collectives.ring_all_reduce"
RIGHT = """
import torch
import torch.distributed as dist

def ring_all_reduce(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    shards = tensor.view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        send, receive = shards[(rank - step) % n], shards[(rank - step - 1) % n]
        arrived = torch.empty_like(receive)
        work = dist.isend(send, group=group, group_dst=(rank + 1) % n)
        dist.recv(arrived, group=group, group_src=(rank - 1) % n)
        receive.copy_(receive + arrived if step < n - 1 else arrived)
        work.wait()
"""
WRONG = "def ring_all_reduce(tensor, group=None):\n    tensor.zero_()"
STUB = "def ring_all_reduce(tensor, group=None):\n    raise NotImplementedError()"
FORGES = """
import json, os, sys
from pathlib import Path
forged = {"objects": {"ring_all_reduce": {"blob": "cGFzc2Vk"}}, "problems": []}
Path(sys.argv[1], "objects.json").write_text(json.dumps(forged))
os._exit(0)
"""
TAMPERS = """
from pdt.grade import command, judge, report, session
report.Report.passed = property(lambda self: True)
judge.grade = command.grade_notebook = session.Session.run = lambda *args, **kwargs: True
"""
BAD = {
    "raises": (["1/0"], "raised ZeroDivisionError"),
    "has a syntax error": (["def ring_all_reduce(:"], "SyntaxError"),
    "exits": (["import sys; sys.exit(0)"], "SystemExit"),
    "hangs": (["x = 1", "import time; time.sleep(600)"], "was still running after 10 s"),
    "dies": (["import os; os._exit(0)"], "code cell 1 ended the process (exit code 0"),
    "eats memory": (["import torch", "x = torch.ones(6 << 30, dtype=torch.uint8)"], "memory"),
    "defines nothing": (["x = 1"], "does not define it"),
    "prints garbage": (["import os; os.write(1, b'\\xff\\0' * 5_000_000)"], "does not define it"),
    "defines a number": (["ring_all_reduce = 42"], "with the sum of all tensors"),
    "defines None": (["ring_all_reduce = None"], "there is nothing in it yet"),
    "hands in a generator": (["ring_all_reduce = (i for i in ())"], "cannot be sent"),
    "forges what it hands in": ([FORGES], "cannot be loaded in a rank"),
    "tampers with the grader": ([TAMPERS, WRONG], "with the sum of all tensors"),
}


def write_notebook(folder, cells, name="02_collectives.ipynb"):
    code = [{"cell_type": "code", "source": source.splitlines(keepends=True)} for source in cells]
    path = folder / name
    path.write_text(json.dumps({"cells": code, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}))
    return path


def run_command(*arguments, cwd):
    code = "import sys; from pdt.grade import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes().decode(errors="replace")
        except OSError:
            pass


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD)
def test_a_bad_notebook_gets_a_verdict_and_no_pass(tmp_path, case):
    cells, reason = BAD[case]
    path = write_notebook(tmp_path, cells)
    graded = grade_notebook(path, timeout_s=10.0 if case == "hangs" else 100.0, memory_gb=2.0)
    assert not graded.passed
    (report,) = [report for report in graded.reports if report.name == NAME]
    assert report.failed
    assert report.points == 0
    assert reason in report.text() + graded.problem


@pytest.mark.parametrize(
    "text", ["", "print(1)", "[]", '{"cells": 3}', '{"cells": [{"cell_type": "code"}]}', "\x00"]
)
def test_what_is_no_notebook_gets_a_verdict(tmp_path, text):
    path = tmp_path / "02_collectives.ipynb"
    path.write_text(text)
    graded = grade_notebook(path)
    assert not graded.passed
    assert all("is not a notebook" in report.text() for report in graded.reports)


@pytest.mark.slow
def test_a_cell_that_raises_spoils_the_notebook_and_not_the_exercise(tmp_path):
    graded = grade_notebook(write_notebook(tmp_path, ["1/0", RIGHT]))
    assert [report.name for report in graded.reports if report.passed] == [NAME]
    assert not graded.passed
    assert "code cell 1 raised ZeroDivisionError" in graded.problem


@pytest.mark.slow
def test_modules_beside_the_notebook_are_found(tmp_path):
    (tmp_path / "my_helpers.py").write_text(RIGHT)
    graded = grade_notebook(write_notebook(tmp_path, ["from my_helpers import ring_all_reduce"]))
    assert [report.name for report in graded.reports if report.passed] == [NAME]


@pytest.mark.slow
def test_the_command_writes_results_for_machines_and_leaves_no_process(tmp_path):
    mark = "98765.4321"
    cells = [
        f"import subprocess; subprocess.Popen(['sleep', '{mark}'], start_new_session=True)",
        "%matplotlib inline\n!exit 3\nfrom pdt import grade",
        "%%ranks\nthis is not even Python",
        RIGHT,
        f'grade.check("{NAME}", None)',
    ]
    path = write_notebook(tmp_path, cells)
    done = run_command(path, "--json", "r.json", "--junit", "r.xml", cwd=tmp_path)
    result = json.loads((tmp_path / "r.json").read_text())
    tests = {test["name"]: test for test in result["tests"]}
    assert tests[NAME]["status"] == "passed", done.stdout + done.stderr
    assert tests[NAME]["score"] == tests[NAME]["max_score"] > 0
    assert result["extra_data"]["notebooks"][0]["problem"] == ""
    all_passed = all(test["status"] == "passed" for test in tests.values())
    assert result["extra_data"]["passed"] is all_passed
    assert done.returncode == (0 if all_passed else 1)
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()[0]
    assert len(suite) == len(tests) + 1
    assert not any(mark in line for line in command_lines())


@pytest.mark.slow
def test_a_stub_is_told_what_to_do_and_ends_with_code_1(tmp_path):
    path = write_notebook(tmp_path, [STUB])
    done = run_command(path, "--junit", "r.xml", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "you have not written ring_all_reduce yet" in done.stdout
    assert ElementTree.parse(tmp_path / "r.xml").getroot()[0].get("failures") != "0"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing.ipynb"],
        ["x.ipynb"],
        ["02_collectives.ipynb", "--timeout", "0"],
        ["02_collectives.ipynb", "--memory", "x"],
        ["02_collectives.ipynb", "--json", "no/such/folder.json"],
    ],
)
def test_a_wrong_call_is_told_apart_from_a_failure(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    write_notebook(tmp_path, [], "x.ipynb")
    write_notebook(tmp_path, [])
    assert grade.main(arguments) == 2
    assert "python -m pdt grade" in capsys.readouterr().err
