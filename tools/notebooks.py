"""Run notebooks from top to bottom and store them in one form, or check that this was done.

Paths are of notebooks; a number like 02 means that lesson's notebook and solution; without any, all
of notebooks/ and solutions/. A notebook that fails is left as it was; what it showed is saved in
build/notebooks/.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat

from tools.nbval_mends import FOLDER, private_jupyter, timeout_of
from tools.normalise import ROOT, complaints, normalise

CELL_TIMEOUT_S = 120.0
DPI = 100  # of the figures that are stored


def find(names: list[str], root: Path = ROOT) -> list[Path]:
    """The notebooks meant by these paths and lesson numbers; ValueError when one means none."""
    everything = [*(root / "notebooks").glob("*.ipynb"), *(root / "solutions").glob("*.ipynb")]
    if not names:
        return sorted(everything)
    found: list[Path] = []
    for name in names:
        if name.isdigit():
            paths = sorted(p for p in everything if p.name.startswith(f"{int(name):02d}_"))
        else:
            paths = [Path(name)] if Path(name).is_file() else []
        if not paths:
            raise ValueError(f"{name}: neither a notebook nor the number of a lesson")
        found += paths
    return found


def execute(notebook: Any, folder: Path) -> Any:
    """Run every cell in a fresh kernel that works in `folder`; the notebook with its outputs.

    Raises nbclient's `CellExecutionError`, `CellTimeoutError` or `DeadKernelError`; the notebook
    then holds what was shown until there.
    """
    from nbclient import NotebookClient

    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout_func=lambda cell: timeout_of(cell.metadata.get("tags", []), CELL_TIMEOUT_S),
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=[f"--InlineBackend.rc=figure.dpi={DPI}"],
    )
    with private_jupyter():
        # A kernel repeats on its own terminal what the cells print.
        client.execute(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return notebook


def write(notebook: Any, path: Path) -> None:
    """Replace the file in one step, so that an interrupted run leaves the old one whole."""
    part = path.with_name(path.name + ".part")
    nbformat.validate(notebook)
    part.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    part.replace(path)


def refresh(path: Path, run: bool = True) -> list[str]:
    """Run (if asked) and normalise the notebook in place; what is wrong with it, if anything is."""
    notebook = nbformat.read(path, as_version=4)
    if run:
        try:
            execute(notebook, path.parent)
        except Exception as error:
            kept = ROOT / FOLDER / f"{path.parent.name}-{path.name}"
            kept.parent.mkdir(parents=True, exist_ok=True)
            write(normalise(notebook), kept)
            return [f"{type(error).__name__}: {error}", f"the notebook as it ran: {kept}"]
    notebook = normalise(notebook)
    found = complaints(notebook)
    if not found:
        write(notebook, path)
    return found


def main(argv: list[str] | None = None) -> int:
    """Refresh or check the notebooks asked for; 0 when nothing is wrong with any."""
    parser = argparse.ArgumentParser(prog="python -m tools.notebooks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="PATH|NN")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="look only; nothing is run or written")
    mode.add_argument("--no-run", action="store_true", help="normalise without running")
    options = parser.parse_args(argv)
    try:
        paths = find(options.names)
    except ValueError as error:
        parser.error(str(error))
    wrong = 0
    for path in paths:
        start = time.perf_counter()
        if options.check:
            found = complaints(nbformat.read(path, as_version=4))
        else:
            found = refresh(path, run=not options.no_run)
        wrong += bool(found)
        seconds = time.perf_counter() - start
        kilobytes = path.stat().st_size / 1000
        print(f"{'WRONG' if found else 'ok':5} {seconds:6.1f} s {kilobytes:6.0f} kB  {path}")
        print("".join(f"      {line}\n" for line in found), end="", flush=True)
    print(f"{len(paths)} notebooks, {wrong} with something wrong")
    return 1 if wrong or not paths else 0


if __name__ == "__main__":
    sys.exit(main())
