"""Write constraints.txt: the exact version of everything that `pdt[course,dev]` pulled in here.

`python -m tools.constraints` writes the file from the environment it runs in; `--check` compares.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = """\
# Exact versions that the tests passed with; written by `python -m tools.constraints`.
# torch is named without a build, so that pip takes the one its index offers: CPU or CUDA.
"""


def closure(package: str, extras: set[str]) -> dict[str, str]:
    """Version by normalised name of every installed distribution that `package[extras]` needs.

    Left out: what other platforms need, and the CUDA libraries, which torch pins itself.
    Raises `PackageNotFoundError` when a requirement is not installed.
    """
    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    waiting = [(package, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        here = distribution(name)
        found[normal(name)] = here.version.split("+")[0]
        for requirement in map(Requirement, here.requires or []):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in wanted | {""}):
                waiting.append((requirement.name, frozenset(requirement.extras)))
    del found[normal(package)]
    return {
        name: version
        for name, version in sorted(found.items())
        if not name.startswith(("nvidia-", "cuda-", "triton"))
    }


def normal(name: str) -> str:
    """The name as registries compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Version by normalised name of each `name==version` line; raises ValueError on any other."""
    found = {}
    for line in text.splitlines():
        if not (line := line.split("#")[0].strip()):
            continue
        match = re.fullmatch(r"([\w.-]+)==([\w.!]+)", line)
        if match is None:
            raise ValueError(f"constraints.txt: {line!r} is not of the form name==version")
        found[normal(match[1])] = match[2]
    return found


def main(argv: list[str] | None = None) -> int:
    """Write or check constraints.txt; 0 when it holds."""
    parser = argparse.ArgumentParser(prog="python -m tools.constraints", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    path = ROOT / "constraints.txt"
    check = parser.parse_args(argv).check
    try:
        wanted = closure("pdt", {"course", "dev"})
    except PackageNotFoundError as missing:
        print(f"{missing.name} is not installed: run `make setup`", file=sys.stderr)
        return 1
    if not check:
        lines = [f"{name}=={version}" for name, version in wanted.items()]
        path.write_text(HEADER + "\n".join(lines) + "\n")
        print(f"{path.name}: {len(wanted)} versions")
        return 0
    held = pins(path.read_text())
    wrong = [f"{n}: {held.get(n)} here {v}" for n, v in wanted.items() if held.get(n) != v]
    print("\n".join(wrong) or f"{path.name}: {len(wanted)} versions, all as installed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
