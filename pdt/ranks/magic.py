"""`%%ranks`: run a notebook cell on every rank."""

from __future__ import annotations

import sys
import time
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class

from pdt.ranks.call import Printer
from pdt.ranks.pool import Ranks

PATIENCE_S = 2.0  # a cell that runs longer shows its output as it comes


class Comparer(Printer):
    """Shows what the ranks print once if all print the same, by rank if they differ."""

    def __init__(self, world_size: int) -> None:
        self._lines: list[list[str]] = [[] for _ in range(world_size)]
        self._started_s = time.monotonic()
        self._streams = False

    def line(self, rank: int, text: str) -> None:
        if self._streams:
            super().line(rank, text)
        else:
            self._lines[rank].append(text)

    def flush(self) -> None:
        if not self._streams and time.monotonic() > self._started_s + PATIENCE_S:
            self._streams = True
            self._show_by_rank()
        super().flush()

    def close(self) -> None:
        """Show what has been held back."""
        if self._streams:
            return
        if all(lines == self._lines[0] for lines in self._lines):
            sys.stdout.write("".join(f"{line}\n" for line in self._lines[0]))
        else:
            self._show_by_rank()
        super().flush()

    def _show_by_rank(self) -> None:
        for rank, lines in enumerate(self._lines):
            for line in lines:
                super().line(rank, line)


@magics_class
class RanksMagics(Magics):
    """Registered by `%load_ext pdt`."""

    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """`%%ranks [NAME]`: run the cell on every rank of the `Ranks` object NAME (`ranks`).

        Each rank keeps the variables until its process ends; `rank`, `world_size`, `torch` and
        `dist` (torch.distributed) are there from the start.
        """
        pool = self._pool(line.strip() or "ranks")
        comparer = Comparer(pool.world_size)
        count = self.shell.execution_count if self.shell else 0
        try:
            pool.run_cell(cell, f"Cell In[{count}]", comparer)
        finally:
            comparer.close()

    def _pool(self, name: str) -> Ranks:
        user_ns: dict[str, Any] = self.shell.user_ns if self.shell else {}
        pool = user_ns.get(name)
        if not isinstance(pool, Ranks):
            found = "is not defined" if pool is None else f"is a {type(pool).__name__}"
            raise UsageError(
                f"%%ranks runs on a Ranks object and {name!r} {found}: "
                f"make one by {name} = pdt.Ranks(4)"
            )
        return pool
