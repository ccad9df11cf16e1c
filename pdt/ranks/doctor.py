"""What this machine can run: each thing the course needs, what it costs to lack it, and the fix."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from pdt.ranks import probes
from pdt.ranks.probes import Finding

COURSE = ("jupyterlab", "ipykernel", "matplotlib", "nbval", "nbclient", "tabulate", "tqdm")


def examine(checkout: Path) -> Iterator[Finding]:
    """Look at this machine and at the checkout, one finding after the other."""
    yield probes.python(sys.version_info[:2])
    yield probes.torch()
    yield probes.packages(
        "cloudpickle", ("cloudpickle",), "no function reaches a rank", essential=True
    )
    yield probes.packages(
        "notebooks", COURSE, "no notebooks and no figures; the package itself works"
    )
    yield probes.cores(probes.core_count(), probes.cpu_quota())
    yield probes.memory()
    yield probes.gpus()
    yield probes.shared_memory()
    yield probes.loopback()
    yield probes.temporary_folder()
    yield probes.descriptors(probes.descriptor_limit())
    yield probes.compiler()
    yield probes.namespaces()
    yield probes.writable(checkout)


def report(findings: list[Finding]) -> str:
    """The findings as text: a line each, with costs and fix below what is missing."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        state = "ok" if finding.ok else "MISSING" if finding.essential else "lacks"
        lines.append(f"{state:8}{finding.name:{width}}  {finding.value}")
        if not finding.ok:
            pad = " " * (width + 10)
            lines += [f"{pad}costs: {finding.costs}", f"{pad}fix:   {finding.fix}"]
    return "\n".join([*lines, "", verdict(findings)])


def verdict(findings: list[Finding]) -> str:
    """One sentence: what this machine runs."""
    essential = [finding.name for finding in findings if finding.essential and not finding.ok]
    lacking = [finding.name for finding in findings if not finding.essential and not finding.ok]
    if essential:
        return f"No lesson runs here until this is mended: {', '.join(essential)}."
    if lacking:
        return f"The lessons run here, without: {', '.join(lacking)}."
    return "Everything in the course runs here."


def main(argv: list[str] | None = None) -> int:
    """Print the report; 1 when something essential is missing, else 0."""
    parser = argparse.ArgumentParser(prog="python -m pdt doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(argv)
    findings = list(examine(Path.cwd()))
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        print(report(findings))
    return 1 if any(finding.essential and not finding.ok for finding in findings) else 0
