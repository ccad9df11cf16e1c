"""How long each notebook and solution takes, top to bottom in a fresh kernel: 90 s is the limit."""

from __future__ import annotations

import time

import nbformat
from _common import ROOT, table, write_results
from nbclient import NotebookClient

LIMIT_S = 90


def main() -> None:
    rows = []
    for path in [p for d in ("notebooks", "solutions") for p in sorted((ROOT / d).glob("*.ipynb"))]:
        notebook = nbformat.read(path, as_version=4)
        started_s = time.perf_counter()
        NotebookClient(
            notebook, timeout=120, resources={"metadata": {"path": path.parent}}
        ).execute()
        seconds = time.perf_counter() - started_s
        row = {"notebook": str(path.relative_to(ROOT)), "s": round(seconds, 1)}
        rows.append({**row, "within_90_s": seconds <= LIMIT_S})
    print(table(rows))
    write_results("notebooks", rows)


if __name__ == "__main__":
    main()
