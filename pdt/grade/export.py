"""Results for machines: one JSON that Gradescope reads as it is, and JUnit XML."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from pdt.grade.report import Report, Verdict

NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Graded:
    """One notebook: a report for each of its exercises; `problem`: it does not run by itself."""

    path: str
    lesson: str
    reports: list[Report]
    problem: str = ""

    @property
    def passed(self) -> bool:
        """True only when it runs from top to bottom and every exercise passes."""
        return not self.problem and bool(self.reports) and all(r.passed for r in self.reports)


def to_json(graded: list[Graded]) -> dict[str, Any]:
    """The form of Gradescope's results.json, with our own facts under `extra_data`.

    `score` and `max_score`: points. `tests`: one entry for each exercise, with `name`
    ("02_collectives.ring_all_reduce"), `score`, `max_score`, `status` ("passed" or "failed"),
    `output` (the report as text), and `extra_data`: `seed`, `seconds`, `properties` (each with
    `title`, `status` "ok", "failed" or "unchecked", `expected`, `seen`, `advice`).
    `extra_data`: `passed`, and `notebooks`, each with `path`, `lesson`, `passed`, `problem`.
    """
    reports = [report for each in graded for report in each.reports]
    notebooks = [
        {"path": each.path, "lesson": each.lesson, "passed": each.passed, "problem": each.problem}
        for each in graded
    ]
    return {
        "score": sum(report.points for report in reports),
        "max_score": sum(report.max_points for report in reports),
        "tests": [_test(report) for report in reports],
        "extra_data": {"passed": all(each.passed for each in graded), "notebooks": notebooks},
    }


def _test(report: Report) -> dict[str, Any]:
    return {
        "name": report.name,
        "score": report.points,
        "max_score": report.max_points,
        "status": "passed" if report.passed else "failed",
        "output": report.text(),
        "extra_data": {
            "seed": report.seed,
            "seconds": round(report.seconds, 3),
            "properties": [_property(verdict) for verdict in report.verdicts],
        },
    }


def _property(verdict: Verdict) -> dict[str, str]:
    return {
        "title": verdict.title,
        "status": verdict.status,
        "expected": verdict.expected,
        "seen": verdict.seen,
        "advice": verdict.advice,
    }


def to_junit(graded: list[Graded]) -> bytes:
    """A test suite for each notebook, a test case for each exercise and one for the notebook."""
    root = ElementTree.Element("testsuites")
    for each in graded:
        failures = sum(not report.passed for report in each.reports) + bool(each.problem)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=each.lesson,
            tests=str(len(each.reports) + 1),
            failures=str(failures),
            errors="0",
            time=f"{sum(report.seconds for report in each.reports):.3f}",
        )
        for report in each.reports:
            name = report.name.partition(".")[2]
            case = ElementTree.SubElement(
                suite, "testcase", classname=each.lesson, name=name, time=f"{report.seconds:.3f}"
            )
            if not report.passed:
                _failure(case, ", ".join(report.failed), report.text())
        case = ElementTree.SubElement(
            suite, "testcase", classname=each.lesson, name="runs from top to bottom", time="0.000"
        )
        if each.problem:
            _failure(case, each.problem, each.problem)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


def _failure(case: ElementTree.Element, message: str, text: str) -> None:
    failure = ElementTree.SubElement(case, "failure", message=NOT_IN_XML.sub("?", message))
    failure.text = NOT_IN_XML.sub("?", text)
