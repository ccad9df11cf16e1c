"""Hold notebooks and package together: a definition in a notebook that bears the name of one in
`pdt` must be the same, docstrings aside. A simpler one takes a name of its own (`NaiveDDP`).

Lessons build what stands in the other folders; of the tools in TOOLS, only what their folder hands
out is meant, since a learner cannot know the names inside. Solutions are free: the grader judges
them by what they do.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

import nbformat

from tools.normalise import ROOT

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
TOOLS = ("segment", "ranks", "measure", "grade", "tour", "strategies", "__main__")


def definitions(source: str) -> dict[str, Definition]:
    """The functions and classes that this Python text defines at its top, by name."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node for node in ast.parse(source).body if isinstance(node, kinds)}


def package_definitions(folder: Path) -> dict[str, dict[str, Definition]]:
    """By name: the public definitions of the package, by the path of the file that holds each."""
    found: dict[str, dict[str, Definition]] = {}
    for path in sorted(folder.rglob("*.py")):
        part = path.relative_to(folder).with_suffix("").parts[0]
        handed_out = exports(folder / part / "__init__.py") if part in TOOLS else None
        for name, node in definitions(path.read_text(encoding="utf-8")).items():
            if name in handed_out if handed_out is not None else not name.startswith("_"):
                found.setdefault(name, {})[str(path.relative_to(folder.parent))] = node
    return found


def exports(init: Path) -> set[str]:
    """What `__all__` of this file lists; nothing when there is no such file or list."""
    if not init.exists():
        return set()
    for node in ast.parse(init.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def plain(cell_source: str) -> str:
    """The Python of a cell: without magics, and empty when a magic makes it something else."""
    first, _, rest = cell_source.lstrip().partition("\n")
    if first.startswith("%%"):
        if first.split()[0] not in ("%%ranks", "%%time", "%%timeit", "%%capture"):
            return ""
        cell_source = rest
    return re.sub(r"^(\s*)[%!].*$", r"\1pass", cell_source, flags=re.MULTILINE)


def same(one: Definition, other: Definition) -> bool:
    """Whether two definitions are the same to the letter of the syntax tree, docstrings aside."""
    return _dump(one) == _dump(other)


def differences(notebook: Path, package: dict[str, dict[str, Definition]]) -> list[str]:
    """One line for each definition that bears a name of the package and is none of its own."""
    found = []
    cells = [c for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "code"]
    for number, cell in enumerate(cells, 1):
        try:
            here = definitions(plain(cell.source))
        except SyntaxError as error:
            found.append(f"code cell {number}: {error.msg} in line {error.lineno}")
            continue
        for name, node in here.items():
            twins = package.get(name, {})
            if twins and not any(same(node, twin) for twin in twins.values()):
                found.append(f"code cell {number}: {name} is not the one of {', '.join(twins)}")
    return found


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Compare every lesson's notebook with the package; 0 when no name means two things."""
    argparse.ArgumentParser(prog="python -m tools.names", description=__doc__).parse_args(argv)
    package = package_definitions(root / "pdt")
    wrong = 0
    paths = sorted(root.glob("notebooks/*.ipynb"))
    for path in paths:
        for line in differences(path, package):
            print(f"{path.relative_to(root)}, {line}")
            wrong += 1
    print(f"{len(paths)} notebooks against {len(package)} names: {wrong} differ")
    return 1 if wrong else 0


def _dump(node: Definition) -> str:
    """The tree as text, without positions and docstrings."""
    copy = ast.parse(ast.unparse(node))
    for inner in ast.walk(copy):
        if isinstance(inner, Definition) and ast.get_docstring(inner, clean=False) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.dump(copy)


if __name__ == "__main__":
    sys.exit(main())
