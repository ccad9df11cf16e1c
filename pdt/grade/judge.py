"""From what was seen to verdicts: runs in the grader's process, on plain data only."""

from __future__ import annotations

import time
from typing import Any

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Relation, Run, Wrong
from pdt.grade.report import Report, Verdict
from pdt.grade.session import Session, Stop, Submission

WRITTEN = "is written"
RETURNS = "comes to its end on every rank"
OWN = "does the work itself"
KINDS = {
    "missing": WRITTEN,
    "unwritten": WRITTEN,
    "borrowed": OWN,
    "poisoned": OWN,
    "patched": OWN,
    "bypassed": OWN,
}  # any other stop is of RETURNS
EXPECTED = {
    WRITTEN: "your code in place of the stub",
    RETURNS: "a plain result on every rank, whatever the shape and the number of ranks",
    OWN: "your own code, on a meter and a torch that are as they were",
}
ADVICE = {
    "missing": "run the whole notebook in a fresh kernel: is the name still defined at its end?",
    "unwritten": "you have not written {name} yet: write it where the cell says so; hint 1 begins.",
    "result": "return plain numbers, texts and tensors, in lists, tuples or dicts.",
    "raised": "call it in a cell of your own on this case, and follow the traceback.",
    "died": "the process itself ended: no os._exit, and mind the memory.",
    "hung": "a receive needs a send, kept and waited for; a collective needs every rank.",
    "slow": "it comes to its end, but too late: where does the time go?",
    "unreadable": "return plain numbers, texts and tensors, in lists, tuples or dicts.",
    "borrowed": "the check wants YOUR code to run: write it from the calls that are allowed.",
    "poisoned": "the check wants YOUR code to run: this function may not do the work for it.",
    "patched": "leave the functions and settings of pdt and torch as they are.",
    "bypassed": "make every call through torch.distributed on the group that you were given.",
}
SAY = {
    "missing": "{text}",
    "unwritten": "{text}",
    "borrowed": "{text} was handed in",
    "poisoned": "{text} was called",
    "patched": "changed by your code: {text}",
}


def grade(
    name: str,
    exercise: Exercise,
    submission: Submission,
    session: Session,
    seed: int | None = None,
) -> Report:
    """Run the exercise's trials and judge them; `name` is what the report calls it.

    Whatever the submission does is a verdict. RuntimeError only if the ranks cannot be started.
    """
    dice = Dice.fresh() if seed is None else Dice(seed)
    start_s = time.perf_counter()
    runs, stop = session.run(exercise, submission, exercise.trials(dice))
    verdicts = first_verdicts(exercise, stop) + [
        judge(each, runs, complete=stop is None) for each in exercise.properties
    ]
    return Report(name, exercise.points, verdicts, dice.seed, time.perf_counter() - start_s)


def first_verdicts(exercise: Exercise, stop: Stop | None) -> list[Verdict]:
    """On the three properties that every exercise has: written, comes to an end, own work."""
    if stop is None:
        return [Verdict(title, "ok") for title in (WRITTEN, RETURNS, OWN)]
    at_fault = KINDS.get(stop.kind, RETURNS)
    advice = ADVICE.get(stop.kind, ADVICE["raised"]).format(name=exercise.name)
    seen = SAY.get(stop.kind, "{text}").format(text=stop.text)
    return [
        Verdict(title, "failed", EXPECTED[title], seen, advice)
        if title == at_fault
        else Verdict(title, "ok" if title == WRITTEN else "unchecked")
        for title in (WRITTEN, RETURNS, OWN)
    ]


def judge(prop: Property | Relation, runs: list[Run], *, complete: bool = True) -> Verdict:
    """The verdict on one property: failed at the first run that breaks it, never ok in doubt."""
    samples: list[Any] = list(runs)
    if isinstance(prop, Relation):
        samples = [runs] if complete else []
    for sample in samples:
        try:
            prop.check(sample)
        except Wrong as wrong:
            return _failed(prop, sample, wrong.expected, wrong.seen)
        except Exception as error:
            what = f"something that this check cannot read ({type(error).__name__}: {error})"
            return _failed(prop, sample, "a result of the kind that the exercise asks for", what)
    return Verdict(prop.title, "ok" if complete and samples else "unchecked")


def _failed(prop: Property | Relation, sample: Any, expected: str, seen: str) -> Verdict:
    where = f" ({sample.trial.title})" if isinstance(sample, Run) else ""
    picture = None
    if prop.picture is not None:
        try:
            picture = prop.picture(sample)
        except Exception as error:  # a picture helps; without it the verdict stands
            picture = f"(no picture: {error})"
    return Verdict(prop.title, "failed", expected, seen + where, prop.advice, picture)
