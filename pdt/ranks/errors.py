"""The one error of the live ranks."""

from __future__ import annotations

import re
import sys
from typing import Any, Literal

Kind = Literal["raised", "died", "hung", "result"]


class RankError(RuntimeError):
    """A call on live ranks failed; the rank at fault and its own words come first.

    `rank`: the rank that failed first. `kind`: "raised" (an exception, `text` is its traceback),
    "died" (the process ended), "hung" (no answer within the time-out, `text` is the table of who
    waits for whom), "result" (what the function returned cannot be sent back).
    """

    def __init__(self, rank: int, kind: Kind, headline: str, text: str = "") -> None:
        super().__init__(f"{headline}\n{text}".rstrip())
        self.rank, self.kind, self.headline, self.text = rank, kind, headline, text

    def __str__(self) -> str:
        return _name_cells(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the rank's own words, not the frames of the pool around them."""
        return f"RankError: {self}".splitlines()

    def __reduce__(self) -> tuple:
        return RankError, (self.rank, self.kind, self.headline, self.text)


def _name_cells(text: str) -> str:
    """`Cell In[3], line 2` in place of the temporary file that the kernel names a cell by."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)

    def cell(found: re.Match[str]) -> str:
        known = name_of(found[1]) if name_of else None
        return f"  {known[0]} {known[1]}, line" if known else found[0]

    return re.sub(r'  File "([^"]*ipykernel[^"]*|<ipython-input[^"]*)", line', cell, text)
