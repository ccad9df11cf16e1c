"""The graders, graded: a stub fails with advice, a mutant for its reason, a solution passes."""

import ast
import dis
import importlib
import pkgutil
import sys
from functools import cache
from pathlib import Path
from types import CodeType

import cloudpickle
import pytest
from IPython.core.inputtransformer2 import TransformerManager

import pdt.grade
from pdt.grade.exercise import exercises
from pdt.grade.judge import OWN, RETURNS, WRITTEN, grade
from pdt.grade.notebook import code_cells, harvest
from pdt.grade.session import Session, Submission
from tests.mutants import lessons, load

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as a notebook's functions are

ROOT = Path(__file__).parents[1]
OF_ALL = (WRITTEN, RETURNS, OWN)
TASKS = [(slug, exercise) for slug in lessons() for exercise in exercises(slug)]
MUTANTS = [(slug, wrong) for slug in lessons() for wrong in load(slug)]
FIRST = dict(reversed(MUTANTS))  # of each lesson
QUICK = ("02_collectives", "10_zero2", "13_cpu_offload")  # whose first is a quick one
POISONS = [(slug, exercise, name) for slug, exercise in TASKS for name in exercise.poison]

each_task = pytest.mark.parametrize(
    ("slug", "exercise"), TASKS, ids=[f"{slug}.{exercise.name}" for slug, exercise in TASKS]
)


@pytest.fixture(scope="module")
def session():
    with Session() as live:
        yield live


def names_in(code):
    """The global names that this code uses or binds, and what is defined in it."""
    nested = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*map(names_in, nested))


def definitions(path, names):
    """The notebook's statements, compiled, that bind these names and what they use."""
    body = ast.parse("\n".join(code_cells(path))).body
    codes = [compile(ast.Module([each], []), str(path), "exec") for each in body]
    bound = [{i.argval for i in dis.get_instructions(c) if i.opname == "STORE_NAME"} for c in codes]
    needed, kept = set(names), set()
    while more := [i for i, own in enumerate(bound) if i not in kept and own & needed]:
        kept.update(more)
        needed.update(*(names_in(codes[i]) for i in more))
    return [codes[i] for i in sorted(kept)]


@cache
def submissions(folder, slug):
    """What the notebook of this lesson hands in, by exercise; what only shows it is not run."""
    names = [exercise.name for exercise in exercises(slug)]
    notebook = {"__name__": "__main__"}
    for code in definitions(ROOT / folder / f"{slug}.ipynb", names):
        exec(code, notebook)
    return {name: Submission.of(notebook[name]) for name in names}


def borrows(name):
    """A submission that has the package do the work."""

    def learner(*args, **kwargs):
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)(*args, **kwargs)

    return learner


def test_every_lesson_with_a_solution_has_a_grader_and_mutants_and_the_other_way_round():
    solutions = sorted(path.stem for path in (ROOT / "solutions").glob("*.ipynb"))
    modules = [
        info.name
        for info in pkgutil.iter_modules(pdt.grade.__path__)
        if hasattr(importlib.import_module(f"pdt.grade.{info.name}"), "EXERCISES")
    ]
    assert lessons() == solutions
    assert sorted(slug.partition("_")[2] for slug in solutions) == sorted(modules)


@each_task
def test_an_exercise_has_three_to_six_mutants_that_break_each_of_its_properties(slug, exercise):
    wrong = [each for each in load(slug) if each.exercise == exercise.name]
    titles = [prop.title for prop in exercise.properties]
    broken = {title for each in wrong for title in each.fails}
    assert 3 <= len(wrong) <= 6
    assert all(each.__doc__ for each in wrong), "a mutant says what it gets wrong"
    assert set(titles) <= broken <= {*titles, *OF_ALL}
    assert len(titles) == len(set(titles))


def test_every_mutant_belongs_to_an_exercise():
    known = {(slug, exercise.name) for slug, exercise in TASKS}
    assert {(slug, wrong.exercise) for slug, wrong in MUTANTS} <= known


@pytest.mark.parametrize(
    ("slug", "wrong"),
    [
        pytest.param(
            *(slug, wrong),
            marks=[] if slug in QUICK and wrong is FIRST[slug] else pytest.mark.slow,
            id=f"{slug}.{wrong.__name__}",
        )
        for slug, wrong in MUTANTS
    ],
)
def test_a_mutant_fails_for_its_reason_and_for_no_other(session, slug, wrong):
    exercise = next(each for each in exercises(slug) if each.name == wrong.exercise)
    report = grade(wrong.__name__, exercise, Submission.of(wrong), session)
    assert set(report.failed) == set(wrong.fails), report.text()
    assert not report.passed


@pytest.mark.parametrize(("slug", "exercise", "name"), POISONS, ids=lambda each: str(each)[:60])
def test_the_packages_twin_cannot_do_the_work(session, slug, exercise, name):
    report = grade(name, exercise, Submission.of(borrows(name)), session)
    assert report.failed == [OWN], report.text()
    assert name in report.text()


@pytest.mark.slow
@each_task
def test_an_untouched_stub_fails_with_advice(session, slug, exercise):
    stub = submissions("exercises", slug)[exercise.name]
    report = grade(exercise.name, exercise, stub, session)
    assert report.failed == [WRITTEN], report.text()
    assert f"you have not written {exercise.name} yet" in report.text()


@pytest.mark.slow
@each_task
def test_the_solution_passes(session, slug, exercise):
    report = grade(exercise.name, exercise, submissions("solutions", slug)[exercise.name], session)
    assert report.passed, report.text()


@pytest.mark.parametrize("slug", lessons())
def test_a_solution_is_the_same_without_jupyter(slug):
    """So nbval, which runs it from top to bottom, speaks for `python -m pdt grade`, too."""
    for source in code_cells(ROOT / "solutions" / f"{slug}.ipynb"):
        assert TransformerManager().transform_cell(source).strip() == source.strip()


@pytest.mark.slow
def test_a_whole_solution_passes_from_its_file(session):
    slug = "02_collectives"
    names = [exercise.name for exercise in exercises(slug)]
    found = harvest(ROOT / "solutions" / f"{slug}.ipynb", names)
    assert found.problem == ""
    for exercise in exercises(slug):
        report = grade(exercise.name, exercise, found.submissions[exercise.name], session)
        assert report.passed, report.text()
