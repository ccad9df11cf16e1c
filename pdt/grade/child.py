"""The process in which a notebook runs while it is graded: it hands over objects, as bytes.

Nothing here decides anything: the grader takes the bytes as the submission, whoever wrote them.
"""

from __future__ import annotations

import base64
import json
import linecache
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle


class NoShell:
    """Stands for IPython's shell: magics and shell lines do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def main(work: str) -> None:
    """Run the cells of `work`/job.json and write `work`/objects.json."""
    folder = Path(work)
    job = json.loads((folder / "job.json").read_text())
    import pdt.grade
    from pdt.grade.onrank import limit_data

    limit_data(job["memory_nbytes"])
    pdt.grade.check = lambda *args, **kwargs: None  # the grader checks, and not here
    namespace = _fresh_main()
    os.chdir(job["folder"])
    sys.path.insert(0, job["folder"])
    problems = [
        problem
        for number, source in enumerate(job["cells"], 1)
        if (problem := _run_cell(number, source, namespace, folder / "progress"))
    ]
    (folder / "progress").write_text("")
    objects = {name: _export(namespace[name]) for name in job["names"] if name in namespace}
    part = folder / "objects.part"
    part.write_text(json.dumps({"objects": objects, "problems": problems}))
    part.replace(folder / "objects.json")
    sys.stdout.flush()
    os._exit(0)  # no thread or exit hook of the notebook can hold it


def _fresh_main() -> dict[str, Any]:
    """The namespace of a `__main__` that is the notebook, so that its functions travel whole."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    namespace = vars(module)
    namespace.update(get_ipython=NoShell, display=NoShell().display)
    return namespace


def _run_cell(number: int, source: str, namespace: dict[str, Any], progress: Path) -> str:
    """What went wrong in this cell, in a line; "" when nothing did."""
    from IPython.core.inputtransformer2 import TransformerManager

    progress.write_text(str(number))
    name = f"<cell {number}>"
    try:
        text = TransformerManager().transform_cell(source)
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), namespace)
    except BaseException as error:  # sys.exit() in a cell ends the cell
        traceback.print_exc()
        return f"code cell {number} raised {_in_a_line(error)}"
    return ""


def _in_a_line(error: BaseException) -> str:
    try:
        return traceback.format_exception_only(error)[-1].strip()[:300]
    except Exception:
        return type(error).__name__


def _export(value: Any) -> dict[str, str]:
    try:
        return {"blob": base64.b64encode(cloudpickle.dumps(value)).decode()}
    except BaseException as error:
        return {"problem": f"it cannot be sent to the ranks: {_in_a_line(error)}"}
