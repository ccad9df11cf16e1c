"""A pytest plugin that mends nbval 0.11 for this course; `conftest.py` loads it.

Without it: output of child processes is lost, a trailing `;` does not hide a value, a dead kernel
is noticed at the cell's time-out only, a failed cell drags down all that follow, no cell has a
time-out of its own (`tags: ["timeout-20"]`), a cell that was stored without being run is never
compared, and kernels share the user's runtime folder and history. `tests/test_nbval.py` shows each.
"""

from __future__ import annotations

import copy
import json
import os
import re
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

LIMIT_S = 90.0  # what a notebook may take on 2 cores
POLL_S = 0.5  # how soon a dead kernel is noticed
FOLDER = "build/notebooks"  # where executed notebooks of failed runs and the times go


def pytest_configure(config: pytest.Config) -> None:
    """Mend nbval where it is asked for; a machine without nbval is left alone."""
    if config.getoption("nbval", False) or config.getoption("nbval_lax", False):
        config.pluginmanager.register(NbvalMends(config), "pdt-nbval-mends")


class NbvalMends:
    """The hooks: they live as long as the pytest session and undo what they changed."""

    def __init__(self, config: pytest.Config) -> None:
        import nbval.plugin

        self._config = config
        self._folder = config.rootpath / FOLDER
        self._times: dict[str, list[float]] = {}  # by notebook: seconds of each cell
        self._failed: dict[Any, str] = {}  # by notebook: the cell that failed
        self._outputs: dict[Any, dict[int, list[Any]]] = {}  # by notebook: what its cells showed
        self._nbval = nbval.plugin
        self._original = nbval.plugin.RunningKernel
        nbval.plugin.RunningKernel = mended_kernel(self._original)
        self._private = private_jupyter()
        self._private.__enter__()

    def pytest_unconfigure(self) -> None:
        self._nbval.RunningKernel = self._original
        self._private.__exit__(None, None, None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if _is_cell(item) and item.parent in self._failed:
            pytest.skip(f"{self._failed[item.parent]} of this notebook failed")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Generator[None, Any, Any]:
        if not _is_cell(item):
            return (yield)
        if item.cell.execution_count is None and item.cell.source.strip():
            item.raise_cell_error("stored without having been run: `make notebooks` runs it")
        with _cell_timeout(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        report = yield
        if _is_cell(item):
            notebook = item.nodeid.split("::")[0]
            self._times.setdefault(notebook, []).append(call.duration)
            if call.when == "call":
                outputs = self._outputs.setdefault(item.parent, {})
                outputs[item.cell_num] = item.test_outputs or []
            if report.failed and item.parent not in self._failed:
                self._failed[item.parent] = item.name
                path = self._save(item.parent)
                report.sections.append(("the notebook as it ran", str(path)))
        return report

    def _save(self, notebook: Any) -> Path:
        """Write the notebook with the outputs of this run, so that a log can show them."""
        import nbformat

        executed = copy.deepcopy(notebook.nb)
        code = [cell for cell in executed.cells if cell.cell_type == "code"]
        for number, cell in enumerate(code):
            ran = self._outputs.get(notebook, {})
            cell.outputs = copy.deepcopy(ran.get(number, []))
            cell.execution_count = number + 1 if number in ran else None
        path = self._folder / f"{notebook.path.parent.name}-{notebook.path.name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(executed, path)
        return path

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._times:
            return
        terminalreporter.section("seconds per notebook")
        for line in ledger(self._times, LIMIT_S):
            terminalreporter.line(line)
        self._folder.mkdir(parents=True, exist_ok=True)
        totals = {name: round(sum(seconds), 2) for name, seconds in self._times.items()}
        (self._folder / "seconds.json").write_text(json.dumps(totals, indent=1) + "\n")


def mended_kernel(original: type) -> type:
    """A subclass of nbval's `RunningKernel` that shows all output and notices its own death."""

    class MendedKernel(original):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # ipykernel captures the file descriptors of its children unless it believes that it
            # is itself under test.
            with environment(PYTEST_CURRENT_TEST=None):
                super().__init__(*args, **kwargs)

        def execute_cell_input(self, cell_input: str, allow_stdin: bool | None = None) -> str:
            # IPython looks for a trailing `;` in its history.
            return self.kc.execute(
                cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False
            )

        def get_message(self, stream: str, timeout: float | None = None) -> Any:
            deadline = float("inf") if timeout is None else time.monotonic() + timeout
            while True:
                left = max(deadline - time.monotonic(), 0.0)
                try:
                    return super().get_message(stream, timeout=min(left, POLL_S))
                except Empty:
                    if not self.is_alive():
                        raise RuntimeError("the kernel died while this cell ran") from None
                    if left <= POLL_S:
                        raise

    return MendedKernel


def ledger(times: dict[str, list[float]], limit_s: float) -> list[str]:
    """Lines of text: each notebook's seconds and its slowest cell, the slowest notebook first."""
    lines = []
    for name, seconds in sorted(times.items(), key=lambda entry: -sum(entry[1])):
        over = f"  OVER THE LIMIT OF {limit_s:g} s" if sum(seconds) > limit_s else ""
        lines.append(f"{sum(seconds):7.1f} s  slowest step {max(seconds):5.1f} s  {name}{over}")
    total = sum(map(sum, times.values()))
    return [*lines, f"{total:7.1f} s  {len(times)} notebooks"]


def timeout_of(tags: list[str], default_s: float) -> float:
    """Seconds that a cell with these tags may take: its own, by a tag like `timeout-20`."""
    own = [match for tag in tags if (match := re.fullmatch(r"timeout-(\d+)", tag))]
    return float(own[0][1]) if own else default_s


@contextmanager
def _cell_timeout(item: Any) -> Iterator[None]:
    option = item.config.option
    default = option.nbval_cell_timeout
    option.nbval_cell_timeout = timeout_of(item.cell.metadata.get("tags", []), default)
    try:
        yield
    finally:
        option.nbval_cell_timeout = default


def _is_cell(item: Any) -> bool:
    return hasattr(item, "cell_num")


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Environment variables that hold inside only; None takes one away."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


@contextmanager
def private_jupyter() -> Iterator[None]:
    """Kernels of this environment, with folders of their own for connection files and history."""
    with (
        tempfile.TemporaryDirectory(prefix="pdt-jupyter-", ignore_cleanup_errors=True) as folder,
        environment(
            JUPYTER_RUNTIME_DIR=f"{folder}/runtime",
            IPYTHONDIR=f"{folder}/ipython",
            JUPYTER_PREFER_ENV_PATH="1",
        ),
    ):
        yield


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
