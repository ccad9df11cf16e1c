"""tools.notebooks: a notebook is run and stored whole, or left as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import v4

from tools import notebooks
from tools.normalise import complaints


def make(folder: Path, name: str, *sources: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    cells: list[Any] = [v4.new_markdown_cell("# Title"), *map(v4.new_code_cell, sources)]
    nbformat.write(v4.new_notebook(cells=cells), path)
    return path


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A course of its own, where executed notebooks are saved too."""
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    return tmp_path


def test_a_number_means_the_notebook_and_the_solution(tmp_path: Path) -> None:
    for name in ("notebooks/02_x.ipynb", "solutions/02_x.ipynb", "notebooks/12_y.ipynb"):
        make(tmp_path, name)
    found = [str(path.relative_to(tmp_path)) for path in notebooks.find(["2"], tmp_path)]
    assert found == ["notebooks/02_x.ipynb", "solutions/02_x.ipynb"]
    assert len(notebooks.find([], tmp_path)) == 3


@pytest.mark.parametrize("name", ["7", "missing.ipynb"])
def test_what_means_no_notebook_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        notebooks.find([name], tmp_path)


def test_the_command_refuses_what_means_no_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        notebooks.main(["no/such.ipynb"])
    assert exit_.value.code == 2
    assert "no/such.ipynb" in capsys.readouterr().err


@pytest.mark.slow
def test_a_notebook_runs_in_its_folder_and_is_stored_in_form(root: Path) -> None:
    path = make(
        root, "notebooks/02_x.ipynb", "import os\nprint(os.path.basename(os.getcwd()))", "2"
    )
    assert notebooks.main([str(path)]) == 0
    stored = nbformat.read(path, as_version=4)
    assert complaints(stored) == []
    assert stored.cells[1].outputs[0].text == "notebooks\n"
    assert [cell.execution_count for cell in stored.cells[1:]] == [1, 2]
    text = path.read_text()
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    assert notebooks.main(["--check", str(path)]) == 0
    assert path.read_text() == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [("print('seen')\n1 / 0", "ZeroDivisionError"), ("import os\nos._exit(3)", "DeadKernelError")],
)
def test_a_notebook_that_fails_is_left_as_it_was(
    root: Path, capsys: pytest.CaptureFixture[str], source: str, message: str
) -> None:
    path = make(root, "notebooks/03_x.ipynb", "x = 1", source, "print(x)")
    before = path.read_bytes()
    assert notebooks.main([str(path)]) == 1
    assert message in capsys.readouterr().out
    assert path.read_bytes() == before
    saved = nbformat.read(root / "build/notebooks/notebooks-03_x.ipynb", as_version=4)
    assert saved.cells[1].execution_count == 1
    assert list(path.parent.iterdir()) == [path]


def test_a_check_names_every_bad_notebook_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path, "02_x.ipynb", "1")
    before = path.read_bytes()
    assert notebooks.main(["--check", str(path)]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "never run" in out
    assert "1 notebooks, 1 with something wrong" in out
    assert path.read_bytes() == before


def test_without_running_only_the_form_changes(tmp_path: Path) -> None:
    path = tmp_path / "02_x.ipynb"
    output = v4.new_output("stream", name="stdout", text="kept\n")
    cell = v4.new_code_cell("1 / 0", execution_count=1, outputs=[output], metadata={"a": 1})
    nbformat.write(v4.new_notebook(cells=[cell]), path)
    assert notebooks.main(["--no-run", str(path)]) == 0
    stored = nbformat.read(path, as_version=4).cells[0]
    assert stored.outputs[0].text == "kept\n"
    assert stored.metadata == {}
