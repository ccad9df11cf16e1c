"""Run every test that is marked gpu with the torch of this very Python, and keep what came out.

Nothing is installed: GPU machines bring their own torch. pytest and cloudpickle must be there.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Recorder:
    """A pytest plugin that keeps one row for each test, with the figures that it recorded."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            row = {"test": report.nodeid, "outcome": report.outcome}
            figures = dict(report.user_properties)  # of the fixture record_property
            self.rows.append({**row, "time_s": round(report.duration, 3), **figures})


def files(tests: Path) -> list[str]:
    """The test files that hold a test marked gpu: the others may need what is not installed."""
    every = sorted(tests.glob("test_*.py"))
    return [str(path) for path in every if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]


def missing() -> str | None:
    """What keeps the tests from running here, or None."""
    for module in ("torch", "pytest", "cloudpickle"):
        if importlib.util.find_spec(module) is None:
            return f"{sys.executable} has no {module}; another Python is named by PYTHON="
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} sees no CUDA device"
    return None


def main(argv: list[str] | None = None) -> int:
    """Run the tests and the picture, write benchmarks/results; 0 when one ran and all passed."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    _, pytest_options = parser.parse_known_args(argv)
    if reason := missing():
        print(f"gpu: {reason}", file=sys.stderr)
        return 1
    import pytest

    from benchmarks._common import write_results

    recorder = Recorder()
    chosen = [*files(ROOT / "tests"), "-m", "gpu", *pytest_options]
    status = pytest.main(chosen, plugins=[recorder])
    passed = sum(row["outcome"] == "passed" for row in recorder.rows)
    print(f"gpu: {passed} passed; {write_results('gpu_tests', recorder.rows)}")
    return int(status) or (0 if passed else 1) or draw_overlap()


def draw_overlap() -> int:
    """The picture of a step of DDP on these GPUs; 0 too where nothing is there to draw it with."""
    lacking = [name for name in ("matplotlib", "tabulate") if not importlib.util.find_spec(name)]
    if lacking:
        print(f"gpu: no picture of the overlap, {' and '.join(lacking)} not installed")
        return 0
    script = ROOT / "benchmarks" / "bench_overlap.py"
    return subprocess.run([sys.executable, str(script)], timeout=300, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
