"""`python -m pdt`: doctor, tour, grade."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "doctor": ("pdt.ranks.doctor", "what this machine can run, and what each missing thing costs"),
    "tour": ("pdt.tour", "the course in one minute: every strategy, measured"),
    "grade": ("pdt.grade", "grade exercise notebooks outside Jupyter"),
}


def main(argv: list[str]) -> int:
    """Run a command; 2 when there is none of that name."""
    if argv and argv[0] in COMMANDS:
        return import_module(COMMANDS[argv[0]][0]).main(argv[1:])
    lines = [f"  {name:8} {what}" for name, (_, what) in COMMANDS.items()]
    text = "\n".join(["usage: python -m pdt COMMAND [--help]", "", *lines])
    if argv and argv[0] in ("-h", "--help"):
        print(text)
        return 0
    print(f"no command {argv[0]!r}\n{text}" if argv else text, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
