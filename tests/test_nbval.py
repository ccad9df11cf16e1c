"""Each mend of nbval bites: the same made-up notebooks run with and without `tools.nbval_mends`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from tools.nbval_mends import ledger, timeout_of

ROOT = Path(__file__).resolve().parents[1]
CELL_TIMEOUT_S = 12.0
BARE_TIMEOUT_S = 6.0  # waited for twice

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Cell:
    outcome: str
    message: str


@dataclass(frozen=True)
class Run:
    cells: dict[tuple[str, int], Cell]  # by notebook and number
    text: str
    folder: Path


def code(source: str, *tags: str, stdout: str = "", run: bool = True) -> nbformat.NotebookNode:
    outputs = [v4.new_output("stream", name="stdout", text=stdout)] if stdout else []
    count = 1 if run else None
    return v4.new_code_cell(
        source, outputs=outputs, execution_count=count, metadata={"tags": [*tags]}
    )


CHECKED = "nbval-check-output"
ECHO = "import subprocess\n_ = subprocess.run(['echo', 'from a child'], check=True)"
PRIVATE = """import os, tempfile
for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
    assert os.environ[name].startswith(tempfile.gettempdir()), name"""
NOTEBOOKS = {
    "child": [code(ECHO, CHECKED, stdout="from a child\n")],
    "semicolon": [code("1 + 1;", CHECKED)],
    "dead": [code("import os\nos._exit(3)")],
    "cascade": [code("x = 1"), code("print('seen')\n1 / 0"), code("print(x)")],
    "patience": [code("import time\ntime.sleep(60)", "timeout-2")],
    "unrun": [code("print('never stored')", CHECKED, run=False)],
    "private": [code(PRIVATE)],
}


def run_nbval(folder: Path, timeout_s: float, *plugins: str) -> Run:
    for name, cells in NOTEBOOKS.items():
        nbformat.write(v4.new_notebook(cells=cells), folder / f"{name}.ipynb")
    options = ["--nbval-lax", "--nbval-current-env", f"--nbval-cell-timeout={timeout_s}"]
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *plugins, "."]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1, done.stdout + done.stderr
    cases = ElementTree.parse(report).iter("testcase")
    return Run(dict(map(read_case, cases)), done.stdout, folder)


def read_case(case: ElementTree.Element) -> tuple[tuple[str, int], Cell]:
    name = case.get("classname", "").removesuffix(".ipynb")
    bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
    outcome = bad[0].tag if bad else "passed"
    message = "".join((child.get("message") or "") + (child.text or "") for child in bad)
    number = int(case.get("name", "").removeprefix("Cell "))
    return (name, number), Cell(outcome, message)


@pytest.fixture(scope="module")
def mended(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("mended")
    return run_nbval(folder, CELL_TIMEOUT_S, "-p", "tools.nbval_mends")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_nbval(tmp_path_factory.mktemp("bare"), BARE_TIMEOUT_S)


def test_output_of_a_child_process_reaches_the_cell(mended: Run) -> None:
    assert mended.cells["child", 0].outcome == "passed"


def test_a_trailing_semicolon_hides_the_value(mended: Run) -> None:
    assert mended.cells["semicolon", 0].outcome == "passed"


def test_a_dead_kernel_is_noticed_at_once(mended: Run) -> None:
    cell = mended.cells["dead", 0]
    assert cell.outcome == "failure"
    assert "the kernel died" in cell.message


def test_a_failed_cell_does_not_drag_down_the_rest(mended: Run) -> None:
    outcomes = [mended.cells["cascade", number].outcome for number in range(3)]
    assert outcomes == ["passed", "failure", "skipped"]
    assert "Cell 1 of this notebook failed" in mended.cells["cascade", 2].message


def test_a_failed_notebook_is_saved_as_it_ran(mended: Run) -> None:
    saved = [path for path in mended.folder.rglob("*-cascade.ipynb") if str(path) in mended.text]
    assert len(saved) == 1
    notebook = nbformat.read(saved[0], as_version=4)
    nbformat.validate(notebook)
    kinds = [[output.output_type for output in cell.outputs] for cell in notebook.cells]
    assert kinds == [[], ["stream", "error"], []]
    assert [cell.execution_count for cell in notebook.cells] == [1, 2, None]


def test_a_cell_may_have_a_time_out_of_its_own(mended: Run) -> None:
    cell = mended.cells["patience", 0]
    assert cell.outcome == "failure"
    assert "Timeout of 2 seconds exceeded" in cell.message


def test_a_cell_stored_without_being_run_is_flagged(mended: Run) -> None:
    cell = mended.cells["unrun", 0]
    assert cell.outcome == "failure"
    assert "make notebooks" in cell.message


def test_kernels_have_folders_of_their_own(mended: Run) -> None:
    assert mended.cells["private", 0].outcome == "passed"


def test_the_ledger_is_printed_and_kept(mended: Run) -> None:
    assert "seconds per notebook" in mended.text
    kept = json.loads((mended.folder / "build/notebooks/seconds.json").read_text())
    assert set(kept) == {f"{name}.ipynb" for name in NOTEBOOKS}


def test_a_slow_notebook_is_named_in_the_ledger() -> None:
    slow, quick, total = ledger({"quick.ipynb": [1.0], "slow.ipynb": [60.0, 40.0]}, limit_s=90.0)
    assert "slow.ipynb" in slow
    assert "OVER THE LIMIT OF 90 s" in slow
    assert "OVER" not in quick
    assert total.split()[:2] == ["101.0", "s"]


def test_only_a_tag_of_the_right_form_changes_the_time_out() -> None:
    assert timeout_of(["nbval-check-output", "timeout-20"], 120.0) == 20.0
    assert timeout_of(["timeout", "timeout-", "my-timeout-3"], 120.0) == 120.0


def test_without_the_mends_nbval_still_has_these_traps(bare: Run) -> None:
    """When one of these fails, nbval has mended it: then our mend can go."""
    cells = bare.cells
    assert cells["child", 0].outcome == "failure"
    assert cells["semicolon", 0].outcome == "failure"
    assert f"Timeout of {BARE_TIMEOUT_S:g} seconds exceeded" in cells["dead", 0].message
    assert cells["cascade", 2].outcome == "passed"
    assert f"Timeout of {BARE_TIMEOUT_S:g} seconds exceeded" in cells["patience", 0].message
    assert cells["unrun", 0].outcome == "passed"
    assert cells["private", 0].outcome == "failure"
    assert "seconds per notebook" not in bare.text
