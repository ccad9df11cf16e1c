"""The project holds together: its files agree, imports point down, nothing generated is stale."""

from __future__ import annotations

import ast
import graphlib
import json
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tools import constraints, exercises, lessons, names, notebooks

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = sorted((ROOT / "pdt").rglob("*.py"))

# A file imports from levels below its own, or from a pure file of its own folder or, on level 0, of
# its own level. The instruments and techniques of ONE_THING are each one thing in several files:
# these may import each other, but not in a circle.
LEVELS = {
    0: ("segment", "flat", "buckets", "listen", "measure", "model"),
    1: ("comm",),
    2: ("ranks", "ddp", "zero", "offload", "tensor_parallel", "pipeline_parallel")
    + ("context_parallel", "expert_parallel", "mesh", "checkpoint"),
    3: ("plan",),
    4: ("grade",),
    5: ("strategies",),
    6: ("tour",),
    7: ("__init__", "__main__"),
}
LEVEL = {part: level for level, parts in LEVELS.items() for part in parts}
ONE_THING = {"measure", "comm", "ranks", "grade"}
ONE_THING |= {"ddp", "zero", "offload", "tensor_parallel", "pipeline_parallel"}
RUNTIME = {"torch", "cloudpickle", "pdt"}  # what pdt may import at the top of a file


def part(module: str) -> str:
    """`pdt.comm.meter` -> `comm`; `pdt` itself, which hands out `Ranks` -> `ranks`."""
    return (module.split(".") + ["ranks"])[1]


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name if name == "pdt.__init__" else name.removesuffix(".__init__")


def typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree: ast.AST, top_only: bool = False) -> set[str]:
    """Modules that this source imports (for its types alone does not count)."""
    found: set[str] = set()
    waiting = list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= imported_from(node)
        elif not typing_only(node) and not (
            top_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ):
            waiting += ast.iter_child_nodes(node)
    return found


def imported_from(node: ast.ImportFrom) -> set[str]:
    module = node.module or ""
    below = {f"{module}.{alias.name}" for alias in node.names}
    files = {name for name in below if is_module(name)}
    return files or {module}


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@cache
def source(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_pure(module: str) -> bool:
    """Needs no process group: imports neither torch.distributed nor what does."""
    path = ROOT / (module.replace(".", "/") + ".py")
    if not path.exists():
        return False
    attributes = [node for node in ast.walk(source(path)) if isinstance(node, ast.Attribute)]
    by_name = {ast.unparse(node) for node in attributes if node.attr == "distributed"}
    return not any(name.startswith("torch.distributed") for name in imports(source(path)) | by_name)


def breach(path: Path, other: str) -> str | None:
    """Why the file may not import this module of pdt, or None when it may."""
    mine, theirs = part(module_of(path)), part(other)
    if mine == theirs:
        free = mine in ONE_THING or path.name == "__init__.py" or is_pure(other)
        return None if free else f"{other} is not pure"
    if LEVEL[theirs] < LEVEL[mine] or (LEVEL[theirs] == LEVEL[mine] == 0 and is_pure(other)):
        return None
    return f"{other} is on level {LEVEL[theirs]}, this file on {LEVEL[mine]}"


def test_every_part_of_the_package_has_a_level() -> None:
    assert {part(module_of(path)) for path in PACKAGE} <= set(LEVEL)


def test_imports_point_down() -> None:
    breaches = {
        f"{path.relative_to(ROOT)}: {why}"
        for path in PACKAGE
        for other in imports(source(path))
        if other.split(".")[0] == "pdt" and (why := breach(path, other))
    }
    assert breaches == set()


def test_no_files_import_each_other_in_a_circle() -> None:
    modules = {module_of(path): source(path) for path in PACKAGE}
    graph = {name: imports(tree) & set(modules) - {name} for name, tree in modules.items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    assert len(order) == len(modules)


def test_an_import_that_points_up_is_seen() -> None:
    low, high = ROOT / "pdt/comm/new.py", ROOT / "pdt/ranks/new.py"
    assert "level 2" in (breach(low, "pdt.ranks.pool") or "")
    assert "level 2" in (breach(low, "pdt") or "")
    assert breach(high, "pdt.comm.cost") is None
    assert "level 2" in (breach(high, "pdt.mesh") or "")
    assert "not pure" in (
        breach(ROOT / "pdt/expert_parallel/dispatch.py", "pdt.expert_parallel.router") or ""
    )
    assert "level 2" in (breach(ROOT / "pdt/zero/zero2.py", "pdt.ddp.ddp") or "")
    tree = ast.parse("def f():\n    from pdt.comm import cost\n    import torch.distributed")
    assert imports(tree) == {"pdt.comm.cost", "torch.distributed"}
    assert imports(tree, top_only=True) == set()


def test_the_package_needs_only_its_runtime_dependencies() -> None:
    declared = {Requirement(text).name for text in PYPROJECT["project"]["dependencies"]}
    assert declared == RUNTIME - {"pdt"}
    extra = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in PACKAGE
        for name in imports(source(path), top_only=True)
        if name.split(".")[0] not in RUNTIME | sys.stdlib_module_names
        # what IPython loads on `%load_ext pdt` is there where IPython is
        and not (name.startswith("IPython") and path.name == "magic.py")
    }
    assert extra == set()


def test_constraints_pin_every_dependency_as_tested() -> None:
    pinned = constraints.pins((ROOT / "constraints.txt").read_text())
    extras = PYPROJECT["project"]["optional-dependencies"]
    asked = [*PYPROJECT["project"]["dependencies"], *extras["course"], *extras["dev"]]
    for requirement in map(Requirement, asked):
        name = constraints.normal(requirement.name)
        assert name in pinned, f"{name}: run `python -m tools.constraints`"
        assert requirement.specifier.contains(pinned[name]), requirement


def test_a_constraint_that_is_no_exact_version_is_refused() -> None:
    assert constraints.pins("# note\nTorch==2.13.0  # why\n") == {"torch": "2.13.0"}
    with pytest.raises(ValueError, match="name==version"):
        constraints.pins("torch>=2.11\n")
    with pytest.raises(ValueError, match="name==version"):
        constraints.pins("torch==2.13.0+cpu\n")


def test_the_conda_environment_is_python_and_this_package() -> None:
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert conda["name"] == PYPROJECT["project"]["name"]
    python, pip, by_pip = conda["dependencies"]
    lowest = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    assert re.fullmatch(rf"python>={re.escape(lowest)},<3\.\d+", python)
    assert pip == "pip"
    assert by_pip == {"pip": ["-c constraints.txt", "-e .[course]"]}


def test_the_two_commands_are_there_and_do_their_own_set_up() -> None:
    rules = dict(re.findall(r"^(\w+):([^=\n]*)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    needs = {name: rest.split("##")[0].split() for name, rest in rules.items()}
    assert needs["test"] == ["setup"]
    assert needs["course"] == ["doctor"]
    assert needs["doctor"] == ["setup"]
    assert needs["gpu"] == []  # GPU machines bring their own torch
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_every_make_target_is_explained() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    explained = re.findall(r"^(\w+):.*## ", text, re.MULTILINE)
    assert sorted(explained) == sorted(phony[1].split())


def course_texts() -> dict[str, str]:
    """Everything that runs ranks: code by path, and the code cells of every notebook."""
    folders = ("pdt", "examples", "benchmarks", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    for path in [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("solutions/*.ipynb")]:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        texts[str(path.relative_to(ROOT))] = "\n".join(code)
    return texts


FIXED_PORT = re.compile(
    r"""MASTER_PORT["'\]\s]*[=:,]\s*["']?[1-9]\d+"""  # os.environ["MASTER_PORT"] = "29500"
    r"""|(?:tcp|http)://[\w.]+:[1-9]\d+"""
    r"""|\bport\s*=\s*[1-9]\d{3,}\b"""
)


def test_nothing_names_a_fixed_port() -> None:
    # this file shows some, and the course's own server is tested by what it prints
    exempt = {"tests/test_project.py", "tests/test_tools_course.py"}
    found = {name for name, text in course_texts().items() if FIXED_PORT.search(text)}
    assert found - exempt == set()


@pytest.mark.parametrize(
    "line",
    [
        'os.environ["MASTER_PORT"] = "29500"',
        'env = {"MASTER_PORT": 29500}',
        'init_process_group("gloo", init_method="tcp://127.0.0.1:29500")',
        "TCPStore('127.0.0.1', port=29500)",
    ],
)
def test_a_fixed_port_is_seen(line: str) -> None:
    assert FIXED_PORT.search(line)
    assert not FIXED_PORT.search(line.replace("29500", "0"))


def test_every_notebook_ran_and_is_in_the_stored_form(capsys: pytest.CaptureFixture[str]) -> None:
    status = notebooks.main(["--check"])
    assert status == 0, capsys.readouterr().out


def test_every_exercise_comes_from_its_solution(capsys: pytest.CaptureFixture[str]) -> None:
    status = exercises.main(["--check"])
    assert status == 0, capsys.readouterr().out


def test_every_lesson_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    status = lessons.main([])
    assert status == 0, capsys.readouterr().out


def test_a_name_of_the_package_means_that_in_every_notebook(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = names.main([])
    assert status == 0, capsys.readouterr().out
