"""Verdicts on one exercise, and how they are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "failed", "unchecked"]
WORDS = {"ok": "ok", "failed": "NOT OK", "unchecked": "-"}


@dataclass(frozen=True)
class Verdict:
    """On one property: `expected`, `seen` and `advice` speak when it failed."""

    title: str
    status: Status
    expected: str = ""
    seen: str = ""
    advice: str = ""
    picture: Any = field(default=None, compare=False)

    def lines(self) -> list[str]:
        """As a report shows it: one line when all is well, else what to do about it, too."""
        lines = [f"  {WORDS[self.status]:8}{self.title}"]
        for word in ("expected", "seen", "advice"):
            if self.status == "failed" and (text := getattr(self, word)):
                lines += _indented(f"{word:10}", text)
        if isinstance(self.picture, str):
            lines += _indented("", self.picture)
        return lines


def _indented(head: str, text: str) -> list[str]:
    first, *rest = text.splitlines()
    return [f"          {head}{first}", *(f"          {' ' * len(head)}{line}" for line in rest)]


@dataclass(frozen=True)
class Report:
    """All verdicts on one exercise; `seed` makes the same hidden inputs again."""

    name: str
    max_points: int
    verdicts: list[Verdict]
    seed: int
    seconds: float

    @property
    def passed(self) -> bool:
        """True only when every property was judged and holds."""
        return bool(self.verdicts) and all(v.status == "ok" for v in self.verdicts)

    @property
    def points(self) -> int:
        return self.max_points if self.passed else 0

    @property
    def failed(self) -> list[str]:
        """The titles of the properties that were seen not to hold."""
        return [verdict.title for verdict in self.verdicts if verdict.status == "failed"]

    def text(self) -> str:
        """The report for the learner. The same words for every seed as long as it passes."""
        if self.passed:
            points = f"{self.max_points} point{'s' * (self.max_points != 1)}"
            head = f"{self.name}: passed, {points}"
        else:
            ok = sum(verdict.status == "ok" for verdict in self.verdicts)
            head = f"{self.name}: not yet, {ok} of {len(self.verdicts)} ok (seed={self.seed})"
        return "\n".join([head, *(line for v in self.verdicts for line in v.lines())])


class GradeError(AssertionError):
    """An exercise is not solved yet; Jupyter shows `report.text()` in place of a traceback."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.text())
        self.report = report

    def __reduce__(self) -> tuple:
        return GradeError, (self.report,)

    def _render_traceback_(self) -> list[str]:
        return self.report.text().splitlines()
