"""Lesson 11's exercise on prefetch: the next unit's gather runs while this unit computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_int, expect_tensor
from pdt.grade.gathered import GatheredUnit, held_nbytes

PASSES = ("forward", "backward", "forward", "forward", "backward")  # one evaluation among them
FACTOR = 0.5  # by which the shards shrink after a backward, as by an optimizer


def _trials(dice: Dice) -> Iterator[Trial]:
    for n, count in ((1, 4), (2, 5), (2, 1), (3, 2), (4, 5)):
        width = dice.integer(5, 9)
        matrices = dice.normal((count, width, width), torch.float64)
        x = dice.normal((width,), torch.float64)
        yield Trial([(matrices, x)] * n, f"{count} unit{'s' * (count > 1)}")


def _drive(Prefetch: Callable[[list[GatheredUnit]], Any], matrices: Tensor, x: Tensor) -> dict:
    """Passes over all units, forward and in reverse; every event, and what each compute sees."""
    events: list[tuple[str, int]] = []
    units = [GatheredUnit(i, matrix, events) for i, matrix in enumerate(matrices)]
    prefetch = Prefetch(units)
    seen: dict[str, Any] = {"values": [], "passes": [], "left": []}
    for kind in PASSES:
        events.clear()
        seen["values"].append(_run(prefetch, units, x.clone(), kind, events))
        seen["passes"].append([list(event) for event in events])
        seen["left"].append(held_nbytes(units))
        dist.barrier()
        if kind == "backward":
            for unit in units:
                unit.shard.mul_(FACTOR)
    return seen


def _run(
    prefetch: Any, units: list[GatheredUnit], x: Tensor, kind: str, events: list[tuple[str, int]]
) -> Tensor:
    """One pass: x times each matrix, or its transpose; a unit that is not ready changes nothing."""
    order = range(len(units)) if kind == "forward" else reversed(range(len(units)))
    before, after = getattr(prefetch, f"before_{kind}"), getattr(prefetch, f"after_{kind}")
    for i in order:
        before(i)
        if units[i].ready:
            events.append(("compute", i))
            x = (units[i].matrix if kind == "forward" else units[i].matrix.T) @ x
        else:
            events.append(("compute unready", i))
        after(i)
    return x


def _walk(run: Run) -> Iterator[tuple[int, int, list[tuple[str, int]], int]]:
    """By rank and pass: the rank, the pass's number, its events, and the step (+1 or -1)."""
    for rank, seen in enumerate(run.ranks):
        for number, events in enumerate(seen.result["passes"]):
            step = 1 if PASSES[number] == "forward" else -1
            yield rank, number, [(what, i) for what, i in events], step


def _is_ready(run: Run) -> None:
    for rank, number, events, _ in _walk(run):
        for what, i in events:
            text = f"unit {i} of rank {rank} computes unready in pass {number}"
            expect(what != "compute unready", "each unit whole when it computes", text)


def _is_right(run: Run) -> None:
    matrices, x = run.inputs[0]
    factor = 1.0
    for number, kind in enumerate(PASSES):
        value = x
        for matrix in matrices if kind == "forward" else matrices.flip(0):
            value = factor * (matrix if kind == "forward" else matrix.T) @ value
        for rank, seen in enumerate(run.ranks):
            what = f"the result of {kind} pass {number} on rank {rank}"
            expect_tensor(seen.result["values"][number], value, what, rtol=1e-9, atol=1e-12)
        factor *= FACTOR if kind == "backward" else 1.0


def _at_computes(
    events: list[tuple[str, int]], step: int, count: int
) -> Iterator[tuple[int, int | None, set[int], set[int]]]:
    """At each compute: the unit, the next one, what has begun and what has been waited for."""
    begun: set[int] = set()
    waited: set[int] = set()
    for what, i in events:
        if what == "begin":
            begun.add(i)
        elif what == "wait":
            waited.add(i)
        elif what == "free":
            begun.discard(i)
            waited.discard(i)
        else:
            following = i + step if 0 <= i + step < count else None
            yield i, following, set(begun), set(waited)


def _begins_next(run: Run) -> None:
    for rank, number, events, step in _walk(run):
        for i, following, begun, _ in _at_computes(events, step, len(run.inputs[0][0])):
            wanted = f"the gather of unit {following} begun when unit {i} computes"
            what = f"not begun on rank {rank} in the {PASSES[number]} pass"
            expect(following is None or following in begun, wanted, what)


def _does_not_wait(run: Run) -> None:
    for rank, number, events, step in _walk(run):
        for i, following, _, waited in _at_computes(events, step, len(run.inputs[0][0])):
            wanted = f"the gather of unit {following} under way when unit {i} computes"
            what = f"already waited for on rank {rank} in the {PASSES[number]} pass"
            expect(following not in waited, wanted, what)


def _one_ahead(run: Run) -> None:
    for rank, number, events, step in _walk(run):
        for i, following, begun, _ in _at_computes(events, step, len(run.inputs[0][0])):
            extra = sorted(begun - {i, following})
            what = f"units {extra} too, on rank {rank} in the {PASSES[number]} pass"
            expect(not extra, f"room for unit {i} and the next one alone", what)


def _leaves_nothing(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        for number, nbytes in enumerate(seen.result["left"]):
            what = f"bytes still gathered on rank {rank} after the {PASSES[number]} pass"
            expect_int(nbytes, 0, what)


def _once_each(run: Run) -> None:
    count = len(run.inputs[0][0])
    for rank, number, events, _ in _walk(run):
        begins = sum(what == "begin" for what, _ in events)
        where = f"{begins} on rank {rank}"
        expect(begins <= count, f"{count} gathers in the {PASSES[number]} pass", where)


def _picture(run: Run) -> str:
    """The first forward and backward of rank 0."""
    lines = []
    for kind, events in zip(PASSES[:2], run.ranks[0].result["passes"][:2], strict=True):
        lines.append(f"{kind}: " + ", ".join(f"{what} {i}" for what, i in events))
    return "\n".join(lines)


PREFETCH = Exercise(
    name="Prefetch",
    points=3,
    minutes=20,
    trials=_trials,
    drive=_drive,
    properties=(
        Property(
            "has each unit whole when it computes",
            _is_ready,
            "wait for the unit's own gather before you return.",
            _picture,
        ),
        Property(
            "computes with the shards as they are now",
            _is_right,
            "free a unit after its use: what is kept is old after the optimizer's step.",
        ),
        Property(
            "begins the next gather before the unit computes",
            _begins_next,
            "in forward the next unit is i + 1, in backward i - 1.",
            _picture,
        ),
        Property(
            "does not wait for the next gather",
            _does_not_wait,
            "begin() returns at once; call wait() when the unit itself is needed.",
            _picture,
        ),
        Property(
            "is one unit ahead at most",
            _one_ahead,
            "two units are whole at most: the one that computes and the next.",
            _picture,
        ),
        Property(
            "leaves nothing gathered after a pass",
            _leaves_nothing,
            "free each unit after forward and after backward, and begin nothing beyond the ends.",
            _picture,
        ),
        Property(
            "gathers each unit once in a pass",
            _once_each,
            "a unit that was begun ahead must not be begun again: look at .begun.",
            _picture,
        ),
    ),
)
