"""Run the source of a notebook cell in a rank's lasting namespace."""

from __future__ import annotations

import ast
import linecache
from typing import Any


def run_cell(namespace: dict[str, Any], source: str, name: str) -> None:
    """Execute `source` as a cell: a last expression that is not None is shown as its repr."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, name, "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        if value is not None:
            print(repr(value))
