"""What the benchmarks share: which machine this is, one printed table, one file of results each."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def machine() -> dict[str, Any]:
    """Where and when a result was taken: processor, memory, GPUs, versions, commit and date."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def write_results(name: str, rows: list[dict[str, Any]], **meta: Any) -> Path:
    """Write `benchmarks/results/NAME.json`: rows, the machine, and what else is given. Its path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"name": name, "machine": machine(), **meta, "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def table(rows: list[dict[str, Any]], floatfmt: str = ".4g") -> str:
    """Rows as a table of text; the columns are the keys, in the order of their first appearance."""
    from tabulate import tabulate

    return tabulate(rows, headers="keys", floatfmt=floatfmt, tablefmt="github")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the working tree, with `+` when it holds changes of its own."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD")
    dirty = git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
    return f"{commit}{'+' if dirty else ''}" if commit else "unknown"
