"""tools.lessons and tools.names: a lesson is whole, within its budgets, and true to the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import v4

from tools import lessons, names


def lesson(cells: int = 50, words: int = 1500, lines: int = 4) -> Any:
    text = v4.new_markdown_cell("word " * words)
    code = [v4.new_code_cell("\n".join(["x = 1"] * lines)) for _ in range(cells - 1)]
    return v4.new_notebook(cells=[text, *code])


def whole_course(root: Path, *slugs: str) -> None:
    for place, suffix in lessons.PLACES.items():
        (root / place).mkdir(parents=True)
        for slug in slugs:
            (root / place / f"{slug}{suffix}").touch()


def test_a_whole_lesson_has_no_gaps(tmp_path: Path) -> None:
    whole_course(tmp_path, "00_ranks", "01_memory")
    assert lessons.gaps(tmp_path) == []


@pytest.mark.parametrize(("place", "suffix"), lessons.PLACES.items())
def test_each_missing_file_is_named(tmp_path: Path, place: str, suffix: str) -> None:
    whole_course(tmp_path, "00_ranks", "01_memory")
    (tmp_path / place / f"01_memory{suffix}").unlink()
    assert lessons.gaps(tmp_path) == [f"01_memory: no {place}/01_memory{suffix}"]


def test_one_number_is_one_lesson(tmp_path: Path) -> None:
    whole_course(tmp_path, "00_ranks", "00_wires")
    (found,) = lessons.gaps(tmp_path)
    assert "00: two lessons" in found


@pytest.mark.parametrize(
    ("notebook", "complaint"),
    [
        (lesson(cells=39), "39 cells"),
        (lesson(cells=71), "71 cells"),
        (lesson(words=999), "999 words"),
        (lesson(words=2001), "2001 words"),
        (lesson(lines=9), "9 lines at the median"),
    ],
)
def test_each_budget_is_held(notebook: Any, complaint: str) -> None:
    (found,) = lessons.budget(notebook)
    assert complaint in found


def test_a_lesson_within_its_budgets_passes() -> None:
    assert lessons.budget(lesson()) == []
    assert lessons.budget(lesson(cells=40, words=1000, lines=8)) == []


def test_one_long_cell_is_named() -> None:
    notebook = lesson()
    notebook.cells[-1].source = "\n".join(["x = 1"] * 41)
    assert lessons.budget(notebook) == ["a code cell of 41 lines; 40 at most"]


def test_only_prose_counts_as_words() -> None:
    text = "Four words of *prose* - <b>\n```python\nnot these\n```\n$a + b$ <!-- nor this -->\n"
    assert lessons.words(text) == 4


def solution(exercises: int, hints: int) -> Any:
    head = "**Goal** x **Target** y **Minutes** 10\n" + "<details>hint</details>\n" * hints
    cells = []
    for number in range(exercises):
        cells += [v4.new_markdown_cell(head), v4.new_code_cell(f"grade.check('02.{number}', f)")]
    return v4.new_notebook(cells=cells)


def test_a_full_exercise_passes() -> None:
    assert lessons.form(solution(exercises=3, hints=3)) == []


@pytest.mark.parametrize(
    ("exercises", "hints", "complaint"),
    [(1, 3, "1 calls of grade.check"), (5, 3, "5 calls"), (3, 2, "'<details' 6 times")],
)
def test_what_an_exercise_lacks_is_named(exercises: int, hints: int, complaint: str) -> None:
    (found,) = lessons.form(solution(exercises, hints))
    assert complaint in found


def test_a_course_without_lessons_does_not_pass(tmp_path: Path) -> None:
    assert lessons.main([], tmp_path) == 1


TWIN = '''def ring(x, group=None):
    """The package's words."""
    return x + 1
'''


def course(root: Path, cell: str) -> Path:
    (root / "pdt").mkdir()
    (root / "notebooks").mkdir()
    (root / "pdt/ring.py").write_text("import os\n\n\n" + TWIN + "\n\ndef _own():\n    pass\n")
    (root / "pdt/ranks").mkdir()
    (root / "pdt/ranks/__init__.py").write_text('__all__ = ["Ranks"]\n')
    (root / "pdt/ranks/pool.py").write_text("class Ranks: ...\ndef start(): ...\n")
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell("t"), v4.new_code_cell(cell)])
    nbformat.write(notebook, root / "notebooks/02_x.ipynb")
    return root


@pytest.mark.parametrize(
    "cell",
    [
        TWIN,
        TWIN.replace("The package's words.", "Other words."),
        "def ring(x, group=None): return x + 1  # another layout",
        "%%ranks\n" + TWIN,
        "%matplotlib inline\n" + TWIN,
        "class NaiveRing:\n    pass",
        "def _own():\n    return 3",
        "def start():\n    return 3",
        "%%bash\ndef ring( this is no Python",
    ],
)
def test_the_same_definition_or_another_name_passes(tmp_path: Path, cell: str) -> None:
    assert names.main([], course(tmp_path, cell)) == 0


@pytest.mark.parametrize(
    "cell",
    [
        TWIN.replace("x + 1", "x + 2"),
        TWIN.replace("group=None", "group"),
        "%%ranks\n" + TWIN.replace("x + 1", "x"),
        "class ring:\n    pass",
        "class Ranks:\n    pass",
    ],
)
def test_a_name_of_the_package_means_that_very_thing(
    tmp_path: Path, cell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names.main([], course(tmp_path, cell)) == 1
    out = capsys.readouterr().out
    assert re.search(r"02_x.ipynb, code cell 1: (ring|Ranks) is not the one of pdt/r\w+", out)


def test_a_cell_that_is_no_python_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names.main([], course(tmp_path, "def ring(:")) == 1
    assert "code cell 1" in capsys.readouterr().out


def test_docstrings_of_methods_are_set_aside_too() -> None:
    one, other = (
        ast.parse(f'class A:\n    """a"""\n    def f(self):\n        """{word}"""\n').body[0]
        for word in ("b", "c")
    )
    assert isinstance(one, ast.ClassDef)
    assert isinstance(other, ast.ClassDef)
    assert names.same(one, other)
