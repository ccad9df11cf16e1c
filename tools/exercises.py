"""Generate exercises/NN_slug.ipynb from solutions/NN_slug.ipynb, or check that this was done.

What stands between nbgrader's markers is taken out, and so are all outputs. An exercise that
somebody has worked on is never overwritten, unless by --force; --check lets it pass when it began
as the one that would be generated now, and --strict does not.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import nbformat

from tools.normalise import ROOT, normalise
from tools.notebooks import write

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
CODE_STUB = ("# YOUR CODE HERE", "raise NotImplementedError()")  # as nbgrader writes them
TEXT_STUB = ("YOUR ANSWER HERE",)


def clear(source: str, stub: tuple[str, ...]) -> str:
    """The source with each marked region replaced by the stub, at the indent of its first marker.

    Raises ValueError for a region that begins twice, never ends, or ends without having begun.
    """
    kept: list[str] = []
    inside = False
    for line in source.split("\n"):
        if BEGIN in line:
            if inside:
                raise ValueError(f"{BEGIN!r} stands inside a region that has begun already")
            inside = True
            indent = line[: len(line) - len(line.lstrip())]
            kept += [indent + each for each in stub]
        elif END in line:
            if not inside:
                raise ValueError(f"{END!r} without a {BEGIN!r} before it")
            inside = False
        elif not inside:
            kept.append(line)
    if inside:
        raise ValueError(f"{BEGIN!r} without an {END!r} in the same cell")
    return "\n".join(kept)


def generate(solution: Any, name: str) -> Any:
    """The exercise of this solution; `name` is the solution's path, which the exercise states.

    Raises ValueError when the solution has no marked region at all, or a broken one.
    """
    exercise = nbformat.from_dict(solution)
    for number, cell in enumerate(exercise.cells, 1):
        stub = CODE_STUB if cell.cell_type == "code" else TEXT_STUB
        try:
            cell.source = clear(cell.source, stub)
        except ValueError as error:
            raise ValueError(f"{name}, cell {number}: {error}") from None
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    if sources(exercise) == sources(solution):
        raise ValueError(f"{name}: no cell has a region from {BEGIN!r} to {END!r}")
    note = f"<!-- generated from {name} by `make exercises`: edit that one -->\n"
    exercise.cells[0].source = note + exercise.cells[0].source
    exercise.metadata["pdt"] = {"generated_from": name, "digest": digest(exercise)}
    return normalise(exercise)


def sources(notebook: Any) -> list[str]:
    """The text of every cell."""
    return [cell.source for cell in notebook.cells]


def digest(notebook: Any) -> str:
    """A fingerprint of the cells' texts, by which an exercise that was worked on is known."""
    return hashlib.sha256("\0".join(sources(notebook)).encode()).hexdigest()[:16]


class State(Enum):
    """How a stored exercise stands to the one that its solution gives now."""

    CURRENT = "as generated"
    WORKED_ON = "worked on"
    MISSING = "missing: `make exercises` writes it"
    OLD = "older than its solution: `make exercises` brings it up to date"
    EDITED = "edited, and older than its solution: keep a copy, then `make exercises FORCE=1`"


def state(path: Path, wanted: Any) -> State:
    """Compare the exercise at this path with the one that would be generated."""
    if not path.exists():
        return State.MISSING
    notebook = nbformat.read(path, as_version=4)
    began_as = notebook.metadata.get("pdt", {}).get("digest")
    current = began_as == digest(wanted)
    if began_as != digest(notebook):
        return State.WORKED_ON if current else State.EDITED
    return State.CURRENT if notebook == wanted else State.OLD


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Generate or check every exercise; 0 when all are as they should be."""
    parser = argparse.ArgumentParser(prog="python -m tools.exercises", description=__doc__)
    parser.add_argument("numbers", nargs="*", metavar="NN", help="lessons; all when none is named")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--strict", action="store_true", help="with --check: none is worked on")
    parser.add_argument("--force", action="store_true", help="overwrite what was worked on")
    options = parser.parse_args(argv)
    chosen = {f"{int(number):02d}" for number in options.numbers if number.isdigit()}
    every = sorted((root / "solutions").glob("*.ipynb"))
    paths = [path for path in every if not options.numbers or path.name[:2] in chosen]
    if not paths:
        parser.error(
            f"no solution of lesson {', '.join(options.numbers) or 'NN'} in {root}/solutions"
        )
    wrong = [_one(path, root, options) for path in paths].count(False)
    wrong += _left_over(every, root) if not options.numbers else 0
    return 1 if wrong else 0


def _one(path: Path, root: Path, options: argparse.Namespace) -> bool:
    target = root / "exercises" / path.name
    try:
        wanted = generate(nbformat.read(path, as_version=4), f"solutions/{path.name}")
    except ValueError as error:
        print(f"WRONG {error}")
        return False
    found = state(target, wanted)
    fine = {State.CURRENT} if options.strict or options.force else {State.CURRENT, State.WORKED_ON}
    if options.check or found in fine or (found is State.EDITED and not options.force):
        print(f"{'ok' if found in fine else 'WRONG':5} exercises/{path.name}: {found.value}")
        return found in fine
    target.parent.mkdir(exist_ok=True)
    write(wanted, target)
    print(f"wrote exercises/{path.name}")
    return True


def _left_over(solutions: list[Path], root: Path) -> int:
    names = {path.name for path in solutions}
    extra = [p for p in sorted((root / "exercises").glob("*.ipynb")) if p.name not in names]
    for path in extra:
        print(f"WRONG exercises/{path.name}: there is no such solution")
    return len(extra)


if __name__ == "__main__":
    sys.exit(main())
