"""Check that every lesson is whole and within its budgets.

Each NN_slug stands in notebooks/, solutions/, exercises/ and tests/mutants/; a notebook has 40 to
70 cells and 1,000 to 2,000 words, code cells of 8 lines at the median and 40 at most; a solution
has two to four exercises, each with a goal, a target, minutes and three hints.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import nbformat

from tools.normalise import ROOT

PLACES = {
    "notebooks": ".ipynb",
    "solutions": ".ipynb",
    "exercises": ".ipynb",
    "tests/mutants": ".py",
}
CELLS = range(40, 71)
WORDS = range(1000, 2001)
MEDIAN_LINES, LONGEST_LINES = 8, 40
EXERCISES = range(2, 5)
HINTS = 3  # of each exercise
CHECK = re.compile(r"\bgrade\.check\(")


def lessons(root: Path) -> dict[str, set[str]]:
    """By NN_slug: the places that hold a file of that name."""
    found: dict[str, set[str]] = {}
    for place, suffix in PLACES.items():
        for path in (root / place).glob(f"[0-9][0-9]_*{suffix}"):
            found.setdefault(path.stem, set()).add(place)
    return dict(sorted(found.items()))


def gaps(root: Path) -> list[str]:
    """One line for each file that a lesson lacks, and for each number that two lessons share."""
    every = lessons(root)
    missing = [
        f"{name}: no {place}/{name}{suffix}"
        for name, places in every.items()
        for place, suffix in PLACES.items()
        if place not in places
    ]
    numbers = [name[:2] for name in every]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    return missing + [f"{n}: two lessons, {[x for x in every if x[:2] == n]}" for n in twice]


def words(text: str) -> int:
    """Words of a Markdown text; code blocks, comments, tags and formulas do not count."""
    for pattern in (r"```.*?```", r"<!--.*?-->", r"<[^>]+>", r"\$\$.*?\$\$", r"\$[^$\n]+\$"):
        text = re.sub(pattern, " ", text, flags=re.DOTALL)
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def budget(notebook: Any) -> list[str]:
    """Where a lesson's notebook leaves its budgets: one line each."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    code = [cell.source.count("\n") + 1 for cell in notebook.cells if cell.cell_type == "code"]
    found = []
    if len(notebook.cells) not in CELLS:
        found.append(f"{len(notebook.cells)} cells; {_bounds(CELLS)}")
    if (total := sum(map(words, texts))) not in WORDS:
        found.append(f"{total} words; {_bounds(WORDS)}")
    if code and (median := statistics.median(code)) > MEDIAN_LINES:
        found.append(f"code cells of {median:g} lines at the median; {MEDIAN_LINES} at most")
    found += [
        f"a code cell of {n} lines; {LONGEST_LINES} at most" for n in code if n > LONGEST_LINES
    ]
    return found


def form(solution: Any) -> list[str]:
    """What the exercises of this solution lack: one line each."""
    code = "\n".join(cell.source for cell in solution.cells if cell.cell_type == "code")
    text = "\n".join(cell.source for cell in solution.cells if cell.cell_type == "markdown")
    exercises = len(CHECK.findall(code))
    found = []
    if exercises not in EXERCISES:
        found.append(f"{exercises} calls of grade.check; {_bounds(EXERCISES)}")
    for word, each in (("goal", 1), ("target", 1), ("minutes", 1), ("<details", HINTS)):
        if (count := text.lower().count(word)) < exercises * each:
            found.append(f"{word!r} {count} times; {each} for each of {exercises} exercises")
    return found


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Check every lesson; 0 when there is one or more and nothing is wrong with any."""
    argparse.ArgumentParser(prog="python -m tools.lessons", description=__doc__).parse_args(argv)
    found = gaps(root)
    for place, check in (("notebooks", budget), ("solutions", form)):
        for path in sorted((root / place).glob("*.ipynb")):
            notebook = nbformat.read(path, as_version=4)
            found += [f"{place}/{path.name}: {line}" for line in check(notebook)]
    count = len(lessons(root))
    print("".join(f"{line}\n" for line in found) + f"{count} lessons, {len(found)} complaints")
    return 1 if found or not count else 0


def _bounds(allowed: range) -> str:
    return f"{allowed.start:,} to {allowed.stop - 1:,} are allowed"


if __name__ == "__main__":
    sys.exit(main())
