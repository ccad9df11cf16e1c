"""From a notebook's file to submissions: it runs in a process of its own, with limits."""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdt.grade.processes import Ended, run_limited
from pdt.grade.session import Stop, Submission

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from pdt.grade.child import main; main(sys.argv[1])"
)


@dataclass(frozen=True)
class Harvest:
    """A submission for each name that was asked for; `problem`: what is wrong with the notebook."""

    submissions: dict[str, Submission]
    problem: str = ""


def code_cells(path: Path) -> list[str]:
    """The sources of a notebook's code cells; ValueError when the file is no notebook."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        sources = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
        return ["".join(source) for source in sources]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path.name} is not a notebook ({type(error).__name__}: {error})"
        ) from None


def harvest(
    path: Path, names: Sequence[str], *, timeout_s: float = 300.0, memory_gb: float = 4.0
) -> Harvest:
    """Run the notebook top to bottom in a fresh process and take the objects with these names.

    A cell that raises does not keep the next ones from running, but is a problem. Nothing of the
    notebook runs, or is even opened, in this process.
    """
    try:
        cells = code_cells(path)
    except (ValueError, OSError) as error:
        return _nothing(names, str(error))
    nbytes = int(memory_gb * 2**30)
    with tempfile.TemporaryDirectory(prefix="pdt-grade-") as work:
        folder = str(path.resolve().parent)
        job = {"cells": cells, "names": list(names), "folder": folder, "memory_nbytes": nbytes}
        (Path(work) / "job.json").write_text(json.dumps(job))
        ended = run_limited(
            [sys.executable, "-c", BOOT, work, json.dumps([p or os.getcwd() for p in sys.path])],
            env={**os.environ, "MPLBACKEND": "Agg"},
            timeout_s=timeout_s,
            memory_nbytes=nbytes,
        )
        found = _read(Path(work) / "objects.json")
        if ended.limit or found is None:
            cell = _text(Path(work) / "progress")
            return _nothing(names, _how_it_ended(ended, cell, timeout_s, memory_gb))
    objects, problems = found
    submissions = {name: _submission(objects.get(name), problems, folder) for name in names}
    return Harvest(submissions, "; ".join(problems))


def _nothing(names: Sequence[str], problem: str) -> Harvest:
    return Harvest({name: Submission(problem=Stop("missing", problem)) for name in names}, problem)


def _how_it_ended(ended: Ended, cell: str, timeout_s: float, memory_gb: float) -> str:
    where = f"code cell {cell}" if cell.isdigit() else "the notebook"
    if ended.limit == "time":
        return f"{where} was still running after {timeout_s:g} s"
    if ended.limit == "memory":
        return f"{where} took more than {memory_gb:g} GB of memory"
    last = ended.output.strip().splitlines()[-1:] or ["nothing"]
    return f"{where} ended the process (exit code {ended.code}; printed last: {last[0][:200]})"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _read(path: Path) -> tuple[dict[str, Any], list[str]] | None:
    """What the notebook's process wrote, None when it is not of the form that we asked for."""
    try:
        found = json.loads(path.read_text())
        return dict(found["objects"]), [str(problem) for problem in found["problems"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _submission(found: Any, problems: list[str], folder: str) -> Submission:
    if not isinstance(found, dict):
        why = f" ({'; '.join(problems)})" if problems else ""
        return Submission(problem=Stop("missing", f"the notebook does not define it{why}"))
    if "blob" not in found:
        return Submission(problem=Stop("raised", str(found.get("problem"))))
    try:
        return Submission(base64.b64decode(found["blob"], validate=True), folder=folder)
    except (ValueError, TypeError) as error:
        return Submission(problem=Stop("unreadable", f"no bytes of an object: {error}"))
