"""Grades exercises by what the learner's code does on real ranks: results, bytes, calls, memory.

A grader in ten lines. Lesson `07_sharing` is graded by `pdt/grade/sharing.py`, which holds
`EXERCISES`; an exercise bears the name that its object has in the notebook:

    def _trials(dice):                              # hidden inputs, the same for the same seed
        for n in (1, 2, 3, 4):
            yield Trial([(dice.integers((dice.integer(5, 99),)),) for _ in range(n)])

    def _doubles(run):                              # in the grader's process, on plain data
        for rank, seen in enumerate(run.ranks):
            expect_tensor(seen.args[0], 2 * run.inputs[rank][0], f"rank {rank}'s tensor")

    DOUBLE = Exercise("double", points=1, minutes=5, trials=_trials, properties=(
        Property("doubles its tensor", _doubles, "multiply in place, by tensor.mul_(2)."),))
    EXERCISES = (DOUBLE,)

Each property gets every `Run`: its `inputs` and, by rank, `result`, `args` after the call,
`records` of the meter, `peak` of the ledger, `seconds`. `expect_*` raise `Wrong` with what was
expected and seen. `Relation` is a property of all runs together. `drive(learner, *args)` runs on
each rank when a plain call of the learner's object is not enough (build a model, make a group,
take three steps) and returns plain data. `poison` names the package's twin of the piece. Three
properties come by themselves: it is written, it comes to its end on every rank, it does the work
itself. `tests/mutants/NN_lesson.py` then proves that each property can fail.

What is prevented. The learner's object is opened only in ranks, which are separate processes. A
rank knows its own inputs alone, and no expected value: those are computed and compared in the
grader's process, from plain data of exact types. A call of a poisoned function, a function or
setting of pdt or torch changed in a rank, a call that goes round the meter, a process group that
does not count: each is a verdict, and no pass. In a notebook, `check` runs in the learner's own
process, which can replace `check` itself. `python -m pdt grade` does not have that hole: the
notebook runs in a child process that only hands over objects as bytes, and its own calls of `check`
do nothing there.

What is not prevented: code made to break out. Ranks run as the same user and can open files, talk
by sockets of their own, forge what the rank sends, or kill the grader (that is no pass, but no
verdict either). For marks, run the command in a container, as Gradescope and GitHub Classroom do.
"""

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Relation, Run, Seen, Trial, Wrong
from pdt.grade.in_notebook import check
from pdt.grade.report import GradeError, Report

__all__ = [
    "Dice",
    "Exercise",
    "GradeError",
    "Property",
    "Relation",
    "Report",
    "Run",
    "Seen",
    "Trial",
    "Wrong",
    "check",
    "main",
]


def main(argv: list[str] | None = None) -> int:
    """`python -m pdt grade`: see `pdt.grade.command`."""
    from pdt.grade.command import main as run

    return run(argv)
