"""Wrong solutions, by lesson: `NN_lesson.py` holds 3 to 6 for each exercise, each with its reason.

    @mutant("ring_all_reduce", fails="sends 2(n-1)/n of the tensor")
    def through_rank_0(tensor, group=None): ...

`fails` names the property, or the properties, that the grader must find broken: those and no other.
A mutant is what a learner may well write, so it says in its docstring what it gets wrong.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def mutant(exercise: str, *, fails: str | tuple[str, ...]) -> Callable[[Any], Any]:
    """Mark a function or class as a wrong solution of `exercise`."""

    def mark(wrong: Any) -> Any:
        wrong.exercise = exercise
        wrong.fails = (fails,) if isinstance(fails, str) else tuple(fails)
        return wrong

    return mark


def load(slug: str) -> list[Any]:
    """The wrong solutions of lesson `NN_lesson`, in the order of the file.

    The module is not left among the imported ones: so its functions travel to the ranks whole, as
    those of a notebook do.
    """
    path = HERE / f"{slug}.py"
    spec = importlib.util.spec_from_file_location(f"mutants_of_{slug}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [value for value in vars(module).values() if hasattr(value, "fails")]


def lessons() -> list[str]:
    """The lessons that have wrong solutions here."""
    return sorted(path.stem for path in HERE.glob("[0-9][0-9]_*.py"))
