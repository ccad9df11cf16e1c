"""tools.exercises: what a learner gets holds no solution, and nobody's work is overwritten."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import v4

from tools import exercises
from tools.exercises import BEGIN, CODE_STUB, END, State, clear, generate, state

SOLVED = f'''def add(a, b):
    """The sum."""
    {BEGIN}
    total = a + b
    return total
    {END}


def other():
    return 1'''


def solution(source: str = SOLVED, text: str = "# Exercise\n\nGoal: add.") -> Any:
    output = v4.new_output("stream", name="stdout", text="3\n")
    code = v4.new_code_cell(source, execution_count=1, outputs=[output])
    code.metadata["nbgrader"] = {"grade_id": "add", "solution": True}
    return v4.new_notebook(cells=[v4.new_markdown_cell(text), code])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "solutions").mkdir()
    nbformat.write(solution(), tmp_path / "solutions/02_x.ipynb")
    return tmp_path


def exercise(root: Path) -> Path:
    return root / "exercises/02_x.ipynb"


def test_a_region_becomes_a_stub_at_its_own_indent() -> None:
    cleared = clear(SOLVED, CODE_STUB)
    assert "total" not in cleared
    assert "    # YOUR CODE HERE\n    raise NotImplementedError()\n\n\ndef other" in cleared
    namespace: dict[str, Any] = {}
    exec(compile(ast.parse(cleared), "cell", "exec"), namespace)
    with pytest.raises(NotImplementedError):
        namespace["add"](1, 2)
    assert namespace["other"]() == 1


def test_several_regions_of_one_cell_are_all_cleared() -> None:
    source = f"{BEGIN}\na = 1\n{END}\nkept = 2\n{BEGIN}\nb = 3\n{END}"
    assert clear(source, ("?",)) == "?\nkept = 2\n?"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (f"{BEGIN}\nx", "without an"),
        (f"x\n{END}", "without a "),
        (f"{BEGIN}\n{BEGIN}\n{END}", "begun already"),
    ],
)
def test_broken_markers_are_refused(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clear(source, CODE_STUB)


def test_the_refusal_names_the_notebook_and_the_cell() -> None:
    with pytest.raises(ValueError, match=r"solutions/02_x.ipynb, cell 2: .*END SOLUTION"):
        generate(solution(f"{BEGIN}\nx"), "solutions/02_x.ipynb")


def test_a_solution_without_regions_is_refused() -> None:
    with pytest.raises(ValueError, match="no cell has a region"):
        generate(solution("x = 1"), "solutions/02_x.ipynb")


def test_nothing_that_ran_is_handed_out() -> None:
    made = generate(solution(), "solutions/02_x.ipynb")
    assert made.cells[1].outputs == []
    assert made.cells[1].execution_count is None
    assert made.cells[1].metadata.nbgrader.grade_id == "add"


def test_an_exercise_says_what_it_was_generated_from() -> None:
    made = generate(solution(), "solutions/02_x.ipynb")
    assert made.cells[0].source.startswith("<!-- generated from solutions/02_x.ipynb")
    assert made.metadata.pdt.generated_from == "solutions/02_x.ipynb"


def test_the_solution_is_left_alone() -> None:
    given = solution()
    generate(given, "solutions/02_x.ipynb")
    assert given.cells[1].source == SOLVED
    assert given.cells[1].outputs


def test_a_generated_exercise_is_current(root: Path) -> None:
    assert exercises.main(["--check"], root) == 1
    assert exercises.main([], root) == 0
    assert exercises.main(["--check", "--strict"], root) == 0


def test_a_changed_solution_makes_the_exercise_old(root: Path) -> None:
    exercises.main([], root)
    nbformat.write(solution(text="# Another title"), root / "solutions/02_x.ipynb")
    assert exercises.main(["--check"], root) == 1
    assert exercises.main([], root) == 0
    assert "Another title" in exercise(root).read_text()


def work_on(path: Path) -> bytes:
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].source = "def add(a, b):\n    return a + b"
    nbformat.write(notebook, path)
    return path.read_bytes()


def test_work_of_a_learner_is_never_overwritten(root: Path) -> None:
    exercises.main([], root)
    mine = work_on(exercise(root))
    assert exercises.main([], root) == 0
    nbformat.write(solution(text="# Another title"), root / "solutions/02_x.ipynb")
    assert exercises.main([], root) == 1
    assert exercise(root).read_bytes() == mine
    assert exercises.main(["--force"], root) == 0
    assert exercises.main(["--check", "--strict"], root) == 0


def test_only_the_strict_check_refuses_work_on_a_current_exercise(root: Path) -> None:
    exercises.main([], root)
    work_on(exercise(root))
    assert exercises.main(["--check"], root) == 0
    assert exercises.main(["--check", "--strict"], root) == 1
    wanted = generate(nbformat.read(root / "solutions/02_x.ipynb", 4), "solutions/02_x.ipynb")
    assert state(exercise(root), wanted) is State.WORKED_ON


def test_running_an_exercise_is_no_work_on_it(root: Path) -> None:
    exercises.main([], root)
    notebook = nbformat.read(exercise(root), as_version=4)
    notebook.cells[1].execution_count = 1
    nbformat.write(notebook, exercise(root))
    assert exercises.main([], root) == 0
    assert exercises.main(["--check", "--strict"], root) == 0


def test_an_exercise_without_a_solution_is_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exercises.main([], root)
    nbformat.write(solution(), root / "exercises/09_left_over.ipynb")
    assert exercises.main(["--check"], root) == 1
    assert "09_left_over.ipynb: there is no such solution" in capsys.readouterr().out


def test_a_lesson_that_does_not_exist_is_refused(root: Path) -> None:
    with pytest.raises(SystemExit) as exit_:
        exercises.main(["7"], root)
    assert exit_.value.code == 2
