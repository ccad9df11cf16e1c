"""Grade notebooks outside Jupyter: `python -m pdt grade exercises/02_collectives.ipynb`.

Each notebook runs from top to bottom in a fresh process; each exercise's object is then taken from
it and run on ranks of its own. Magics and shell lines are passed over, and calls of `grade.check`
do nothing.

Exit code 0: every exercise of every notebook passes, and every notebook runs from top to bottom;
1: not so; 2: called wrongly.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pdt.grade.exercise import exercises, lesson
from pdt.grade.export import Graded, to_json, to_junit
from pdt.grade.judge import grade
from pdt.grade.notebook import harvest
from pdt.grade.processes import no_orphans
from pdt.grade.session import Session
from pdt.measure.table import text_table
from pdt.ranks.launcher import fork_server


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code."""
    try:
        options = _parse(argv)
    except SystemExit as end:
        return int(end.code or 0)
    fork_server()  # before anything else: it is ours, and stays to the end
    graded = []
    for path in options.notebooks:
        with no_orphans():
            graded.append(grade_notebook(path, options.timeout, options.memory))
        print(_details(graded[-1]), flush=True)
    print(_table(graded))
    if options.json:
        options.json.write_text(json.dumps(to_json(graded), indent=2) + "\n", encoding="utf-8")
    if options.junit:
        options.junit.write_bytes(to_junit(graded))
    return 0 if all(each.passed for each in graded) else 1


def grade_notebook(path: Path, timeout_s: float = 300.0, memory_gb: float = 4.0) -> Graded:
    """Grade every exercise of the lesson after which the notebook is named.

    `timeout_s`: for the notebook to run, and again for each exercise's trials. `memory_gb`: for the
    notebook and all it starts, and for each rank. Raises ValueError when there is no such lesson.
    """
    todo = exercises(path.stem)
    names = [exercise.name for exercise in todo]
    found = harvest(path, names, timeout_s=timeout_s, memory_gb=memory_gb)
    reports = []
    for exercise in todo:
        with Session(memory_gb=memory_gb, timeout_s=timeout_s) as session:
            name = f"{path.stem}.{exercise.name}"
            reports.append(grade(name, exercise, found.submissions[exercise.name], session))
    return Graded(str(path), path.stem, reports, found.problem)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    about, _, codes = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="python -m pdt grade", description=about, epilog=codes)
    parser.add_argument("notebooks", nargs="+", type=Path, metavar="NN_LESSON.ipynb")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="results, as Gradescope reads them"
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="results as JUnit XML")
    parser.add_argument("--timeout", type=_positive, default=300.0, metavar="S", help="seconds for "
                        "a notebook to run, and for each exercise (%(default)g)")  # fmt: skip
    parser.add_argument("--memory", type=_positive, default=4.0, metavar="GB", help="memory for a "
                        "notebook with all it starts, and for each rank (%(default)g)")  # fmt: skip
    options = parser.parse_args(argv)
    for path in options.notebooks:
        if not path.is_file():
            parser.error(f"{path}: there is no such file")
        try:
            lesson(path.stem)
        except ValueError as error:
            parser.error(f"{path}: {error}")
    for path in (options.json, options.junit):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no such folder")
    return options


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _details(graded: Graded) -> str:
    lines = [f"{graded.path}: {graded.problem or 'runs from top to bottom'}", ""]
    lines += [f"{report.text()}\n" for report in graded.reports]
    return "\n".join(lines)


def _table(graded: list[Graded]) -> str:
    rows: list[tuple[str, str, str]] = []
    for each in graded:
        for report in each.reports:
            points = f"{report.points}/{report.max_points}"
            rows.append((report.name, points, "passed" if report.passed else "failed"))
        if each.problem:
            rows.append((each.lesson, "", "does not run from top to bottom"))
    return text_table(("exercise", "points", "verdict"), rows)


if __name__ == "__main__":
    sys.exit(main())
