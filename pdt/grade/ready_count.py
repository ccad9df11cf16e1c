"""What lesson 05's counter of ready gradients must do: say which buckets leave, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial, Wrong
from pdt.grade.expect import expect

REFUSED = "refused"
Plan = list[list[int]]


def _shuffled(dice: Dice, items: list[int]) -> list[int]:
    items = list(items)
    for i in range(len(items) - 1, 0, -1):
        j = dice.integer(0, i)
        items[i], items[j] = items[j], items[i]
    return items


def _plan(dice: Dice) -> Plan:
    """Three to five buckets over the positions of a model, last ones first."""
    sizes = [dice.integer(2, 4) for _ in range(dice.integer(3, 5))]
    ends = list(accumulate(sizes))
    positions = list(reversed(range(ends[-1])))
    return [positions[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _late(plan: Plan, again: int) -> list[int]:
    """In the order of the plan, and `again` once more at the end of its bucket."""
    return [i for bucket in plan for i in [*bucket, *([again] * (again in bucket))]]


def _ready_trials(dice: Dice) -> Iterator[Trial]:
    plan = _plan(dice)
    straight = [i for bucket in plan for i in bucket]
    backwards = [i for bucket in reversed(plan) for i in bucket]
    once = dict.fromkeys(sorted(straight), 1)
    for label, arrivals in (
        ("as planned", straight),
        ("the last bucket fills first", backwards),
        ("in any order", _shuffled(dice, straight)),
    ):
        yield Trial([(plan, once, [arrivals])], label)
    again = plan[1][0]  # of the second bucket, so that something follows and something precedes
    twice = {**once, again: 2}
    for label, expected, arrivals in (
        ("one comes twice, as it should", twice, [again, *straight]),
        ("one comes twice, the second time late", twice, _late(plan, again)),
        ("one comes less often than it should", twice, straight),
        ("one comes early more often than it should", once, [again, *straight]),
    ):
        yield Trial([(plan, expected, [arrivals])], label)
    yield Trial([(plan, once, [[*straight, again]])], "one comes after its bucket has left")
    idle = plan[-1][-1]
    short = [i for i in straight if i not in (again, idle)]
    yield Trial([(plan, once, [short, straight])], "two never come, then all do")
    yield Trial([(plan, once, [straight, straight, straight])], "three backwards")
    yield Trial([([[0]], {0: 1}, [[0], [0]])], "one parameter")


def _drive(
    learner: Callable[..., Any], plan: Plan, expected: dict[int, int], backwards: list[list[int]]
) -> list[tuple[list[Any], Any]]:
    """By backward: what `arrive` returned for each gradient, and what `end` returned."""
    counter = learner([list(bucket) for bucket in plan], dict(expected))
    log: list[tuple[list[Any], Any]] = []
    for arrivals in backwards:
        sent: list[Any] = []
        try:
            for param in arrivals:
                sent.append(counter.arrive(param))
        except NotImplementedError:  # a kind of RuntimeError: not written yet
            raise
        except RuntimeError:
            return [*log, ([*sent, REFUSED], None)]
        log.append((sent, counter.end()))
    return log


def _complete_at(arrivals: list[int], expected: dict[int, int]) -> dict[int, int]:
    """The index of the arrival with which each parameter is complete."""
    seen: Counter[int] = Counter()
    at: dict[int, int] = {}
    for k, param in enumerate(arrivals):
        seen[param] += 1
        if seen[param] == expected[param]:
            at[param] = k
    return at


def _leaving(plan: Plan, expected: dict[int, int], arrivals: list[int]) -> Plan:
    """By arrival, the buckets that leave with it."""
    at = _complete_at(arrivals, expected)
    never = len(arrivals)
    full_at = (max(at.get(i, never) for i in bucket) for bucket in plan)
    sent: Plan = [[] for _ in range(never + 1)]
    for bucket, k in enumerate(accumulate(full_at, max)):
        sent[k].append(bucket)
    return sent[:never]


def _sent(run: Run, number: int) -> Plan:
    """What left with each gradient of this backward."""
    sent = run.ranks[0].result[number][0]
    for k, each in enumerate(sent):
        good = type(each) is list and all(type(i) is int for i in each)
        if not good and each != REFUSED:
            raise Wrong("arrive returns a list of buckets (int)", f"{each!r:.40} at gradient {k}")
    return sent


def _repeats(run: Run) -> bool:
    """Whether something comes, or should come, more than once in a backward."""
    _, expected, backwards = run.inputs[0]
    counts = [max(Counter(arrivals).values()) for arrivals in backwards]
    return max(*counts, *expected.values()) > 1


def _is_in_order(run: Run) -> bool:
    left = [i for each in _sent(run, 0) if each != REFUSED for i in each]
    return left == list(range(len(left)))


def _in_order(run: Run) -> None:
    left = [i for each in _sent(run, 0) if each != REFUSED for i in each]
    expect(_is_in_order(run), "buckets leave as 0, 1, 2, ...", left)


def _compare(run: Run, number: int) -> None:
    plan, expected, backwards = run.inputs[0]
    sent = _sent(run, number)
    right = _leaving(plan, expected, backwards[number])
    for k, (leaves, param) in enumerate(zip(right, backwards[number], strict=True)):
        seen = sent[k] if k < len(sent) else "nothing: it had refused one before"
        what = f"gradient {k} (of parameter {param}, plan {plan}) lets {leaves} go"
        expect(seen == leaves, what, seen)


def _at_the_last(run: Run) -> None:
    if not _repeats(run) and _is_in_order(run):
        _compare(run, 0)


def _is_late(run: Run) -> bool:
    """Whether the first backward of the trial has a gradient whose bucket has left."""
    plan, expected, backwards = run.inputs[0]
    left: set[int] = set()
    for param, leaves in zip(backwards[0], _leaving(plan, expected, backwards[0]), strict=True):
        if param in left:
            return True
        left.update(i for bucket in leaves for i in plan[bucket])
    return False


def _each_as_often(run: Run) -> None:
    if _repeats(run) and not _is_late(run) and _is_in_order(run):
        _compare(run, 0)
        _misses(run, 0)


def _refuses_late(run: Run) -> None:
    if _is_late(run):
        last = _sent(run, 0)[-1]
        expect(last == REFUSED, "RuntimeError for a gradient whose bucket has left", f"{last}")


def _misses(run: Run, number: int) -> None:
    _, expected, backwards = run.inputs[0]
    missing = run.ranks[0].result[number][1]
    right = sorted(set(expected) - set(_complete_at(backwards[number], expected)))
    what = f"end() of backward {number} returns {right}"
    expect(type(missing) is list and missing == right, what, f"{missing!r:.60}")


def _begins_afresh(run: Run) -> None:
    """What `end` returned, and what left in each backward but the first."""
    backwards = run.inputs[0][2]
    if len(backwards) == 1 or not _is_in_order(run):
        return
    for number in range(min(len(backwards), len(run.ranks[0].result))):
        if number:
            _compare(run, number)
        _misses(run, number)


READY_COUNT = Exercise(
    name="ReadyCount",
    points=3,
    minutes=20,
    trials=_ready_trials,
    drive=_drive,
    properties=(
        Property(
            "lets buckets leave in the order of the plan",
            _in_order,
            "a full bucket waits until all before it have left: keep the number of the next one.",
        ),
        Property(
            "lets a bucket leave with its last gradient",
            _at_the_last,
            "after each gradient, go on while the next bucket is full: one may release several.",
        ),
        Property(
            "counts a gradient that comes several times",
            _each_as_often,
            "count by parameter: only its last expected gradient makes it complete, and only once.",
        ),
        Property(
            "refuses a gradient that comes too late",
            _refuses_late,
            "raise RuntimeError: what comes after its bucket has left would be averaged by nobody.",
        ),
        Property(
            "says what is missing, and starts afresh",
            _begins_afresh,
            "end() lists the incomplete parameters in ascending order and resets every count.",
        ),
    ),
)
