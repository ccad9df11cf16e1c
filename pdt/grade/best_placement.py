"""Lesson 13's exercise on placement: the cheapest cut of a graph between device and host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial, Wrong
from pdt.grade.expect import expect
from pdt.plan import placement
from pdt.plan.placement import EDGES, NODES, bus_nbytes, device_nbytes

PAPER, TIES = "the four nodes of ZeRO-Offload", "cuts of the same traffic"
Edges = dict[tuple[str, str], int]


def _trials(dice: Dice) -> Iterator[Trial]:
    """The paper's graph with several budgets, and others with many edges of the same bytes."""
    for budget in (2, dice.integer(4, 13), 15, 16, 99):
        yield Trial([(dict(NODES), dict(EDGES), ["forward-backward"], budget)], PAPER)
    for count in (1, 2, 4, 6, 7, 8):
        names = [f"node {i}" for i in range(count)]
        nodes = {name: dice.integer(0, 9) for name in names}
        pinned = [name for name in names if dice.integer(0, 3) == 0]
        least = device_nbytes(pinned, nodes)
        budget = dice.integer(least, max(least, sum(nodes.values()) - 1))
        yield Trial([(nodes, _edges(dice, names), pinned, budget)], f"{count} nodes")
    yield Trial([_one_way(dice)], "much one way, little the other")
    yield Trial([_tie(dice)], TIES)
    yield Trial([_large_and_near(dice)], "the largest node has the widest edges")


def _edges(dice: Dice, names: list[str]) -> Edges:
    """In both directions, and none between some."""
    pairs = ((a, b) for a in names for b in names if a != b and dice.integer(0, 1))
    return {pair: 2 * dice.integer(1, 5) for pair in pairs}


def _one_way(dice: Dice) -> tuple:
    """To leave out "a" costs little on the way out and much on the way back."""
    much, little = dice.integer(20, 30), dice.integer(1, 3)
    edges = {("x", "a"): little, ("a", "x"): much, ("x", "b"): 2 * little + 2, ("b", "x"): 1}
    return {"x": 1, "a": 5, "b": 5}, edges, ["x"], 6


def _tie(dice: Dice) -> tuple:
    """Two cuts of least traffic, and the one with more memory is met first in any usual order."""
    nbytes = dice.integer(1, 5)
    edges = {("x", "a"): nbytes, ("a", "x"): nbytes, ("x", "b"): nbytes, ("b", "x"): nbytes}
    nodes = {"x": 1, "a": 9, "b": dice.integer(3, 8)}
    return nodes, edges, ["x"], 1 + nodes["a"]


def _large_and_near(dice: Dice) -> tuple:
    wide = dice.integer(20, 30)
    edges = {("x", "a"): wide, ("a", "x"): wide, ("x", "b"): 1, ("b", "c"): 1, ("c", "x"): 1}
    return {"x": 0, "a": 12, "b": 7, "c": 8}, edges, ["x"], 20


def _drive(
    learner: Callable[..., Any], nodes: dict[str, int], edges: Edges, pinned: list[str], budget: int
) -> Any:
    """The names on the device, sorted; anything else as its type's name."""
    found = learner(dict(nodes), dict(edges), set(pinned), budget)
    if not isinstance(found, (set, frozenset, list, tuple)):
        return f"{type(found).__name__}" + " (is a `return` missing?)" * (found is None)
    return sorted(str(name) for name in found)


def _found(run: Run) -> tuple[set[str], dict[str, int], Edges, set[str], int]:
    nodes, edges, pinned, budget = run.inputs[0]
    found = run.ranks[0].result
    if type(found) is not list or not set(found) <= set(nodes):
        raise Wrong("a set of names of nodes", found)
    return set(found), nodes, edges, set(pinned), budget


def _fits(run: Run) -> None:
    found, nodes, _, pinned, budget = _found(run)
    expect(pinned <= found, f"{sorted(pinned)} on the device", f"{sorted(found)}")
    nbytes = device_nbytes(found, nodes)
    expect(nbytes <= budget, f"{budget} bytes on the device at most", f"{nbytes}")


def _least(run: Run) -> tuple[int, int, int, int]:
    """Traffic and memory of what was found, and the least."""
    found, nodes, edges, pinned, budget = _found(run)
    best = placement.best_placement(nodes, edges, pinned, budget)
    return (
        bus_nbytes(found, edges),
        device_nbytes(found, nodes),
        bus_nbytes(best, edges),
        device_nbytes(best, nodes),
    )


def _crosses_least(run: Run) -> None:
    traffic, _, least, _ = _least(run)
    found = sorted(_found(run)[0])
    expect(traffic <= least, f"a cut that {least} bytes cross", f"{traffic}, with {found}")


def _keeps_least(run: Run) -> None:
    if run.trial.label not in (PAPER, TIES):
        return
    traffic, nbytes, least, fewest = _least(run)
    if traffic == least and nbytes <= run.inputs[0][3]:  # else another property speaks
        expect(nbytes <= fewest, f"{fewest} bytes on the device, as cheap", f"{nbytes} bytes")


def _is_the_papers(run: Run) -> None:
    if run.trial.label == PAPER and run.inputs[0][3] < 16:
        found = sorted(_found(run)[0])
        budget = f"with a budget of {run.inputs[0][3]}"
        expect(found == ["forward-backward", "p16"], f"forward-backward and p16 {budget}", found)


BEST_PLACEMENT = Exercise(
    name="best_placement",
    points=2,
    minutes=15,
    trials=_trials,
    drive=_drive,
    poison=("pdt.plan.placement.best_placement", "pdt.plan.placement.placements"),
    properties=(
        Property(
            "keeps what is pinned, within the budget",
            _fits,
            "leave out every placement without the pinned nodes, or with more than budget.",
        ),
        Property(
            "lets the least cross the bus",
            _crosses_least,
            "an edge crosses if its ends lie apart, in whichever direction it points.",
        ),
        Property(
            "keeps the least memory of equally cheap cuts",
            _keeps_least,
            "compare pairs: (traffic, memory).",
        ),
        Property(
            "finds ZeRO-Offload's placement",
            _is_the_papers,
            "by hand: which edges does {forward-backward, p16} cut, and what does it keep?",
        ),
    ),
)
