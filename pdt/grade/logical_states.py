"""Lesson 09's exercise on saving: whole tensors out of shards, and shards out of whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pdt.comm.meter import meter
from pdt.flat import ShardLayout, unflatten
from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial, Wrong
from pdt.grade.expect import expect, expect_tensor

PADDING = 99.0  # what stands in the padding of the shards to save: nobody may read it
NAMES = (("exp_avg", "exp_avg_sq"), ("momentum_buffer",), ("exp_avg", "max_exp_avg_sq"))
Saved = list[dict[str, Tensor]]


def _trials(dice: Dice) -> Iterator[Trial]:
    """States that these ranks hold, to save, and others that any number of ranks has saved."""
    for n in (1, 2, 3, 4):
        sizes: tuple[list[tuple[int, ...]], ...] = (
            [(n * dice.integer(2, 5), 3), (n,)],
            [(dice.integer(4, 9), 5), (), (3,), (dice.integer(1, 9),)],
            [(1,)],
        )
        for shapes in sizes:
            names = dice.choice(NAMES)
            whole, other = (_whole(dice, shapes, names, step) for step in (7.0, 11.0))
            inputs = [(shapes, _shard(whole, shapes, rank, n), other) for rank in range(n)]
            yield Trial(inputs, f"shapes {shapes}")


def _whole(dice: Dice, shapes: list[tuple[int, ...]], names: tuple[str, ...], step: float) -> Saved:
    return [
        {"step": torch.tensor(step)} | {name: dice.normal(shape) for name in names}
        for shape in shapes
    ]


def _layout(shapes: list[tuple[int, ...]], n: int) -> ShardLayout:
    return ShardLayout(tuple(torch.Size(shape).numel() for shape in shapes), n)


def _shard(
    whole: Saved, shapes: list[tuple[int, ...]], rank: int, n: int, padding: float = PADDING
) -> dict[str, Tensor]:
    """A rank's state: the shards of the flat tensors, and the step count."""
    layout = _layout(shapes, n)
    state = {"step": whole[0]["step"].clone()}
    for name in whole[0].keys() - {"step"}:
        flat = torch.full((layout.padded_numel,), padding)
        like = [torch.empty(shape) for shape in shapes]
        views = unflatten(flat[: layout.offsets[-1]], like)
        for view, of_param in zip(views, whole, strict=True):
            view.copy_(of_param[name])
        state[name] = flat.chunk(n)[rank].clone()
    return state


def _drive(
    LogicalStates: Callable[..., Any],
    shapes: list[tuple[int, ...]],
    state: dict[str, Tensor],
    other: Saved,
) -> dict[str, Any]:
    """Save one, load the other; bytes and calls of each, and what their tensors keep alive."""
    states = LogicalStates(shapes)
    with meter() as to_save:
        saved = states.save(state)
    with meter() as to_load:
        loaded = states.load(other)
    return {
        "saved": saved,
        "loaded": loaded,
        "saved beyond": _beyond(saved),
        "loaded beyond": _beyond([loaded]),
        "sent": to_save.total().wire_nbytes,
        "calls": len(to_load.records),
    }


def _beyond(states: Any) -> int:
    """Bytes that the tensors keep alive beyond their own; those of no tensors are none."""
    if not isinstance(states, list):
        return 0
    tensors = [v for s in states if isinstance(s, dict) for v in s.values()]
    return sum(v.untyped_storage().nbytes() - v.nbytes for v in tensors if isinstance(v, Tensor))


def _saved(run: Run, rank: int) -> Saved:
    """By parameter, as the rank saved them; raises `Wrong` for another form."""
    saved, shapes, state = run.ranks[rank].result["saved"], *run.inputs[rank][:2]
    names = sorted(state)
    good = isinstance(saved, list) and len(saved) == len(shapes)
    if not good or any(not isinstance(s, dict) or sorted(s) != names for s in saved):
        items = saved if isinstance(saved, list) else [saved]
        shown = [sorted(s) if isinstance(s, dict) else type(s).__name__ for s in items]
        raise Wrong(f"a list of {len(shapes)} dicts with {names} on rank {rank}", shown)
    return saved


def _loaded(run: Run, rank: int) -> dict[str, Tensor]:
    """The state that the rank loaded; raises `Wrong` for another form."""
    loaded, names = run.ranks[rank].result["loaded"], sorted(run.inputs[rank][2][0])
    if not isinstance(loaded, dict) or sorted(loaded) != names:
        shown = sorted(loaded) if isinstance(loaded, dict) else type(loaded).__name__
        raise Wrong(f"a dict with {names}, loaded by rank {rank}", shown)
    return loaded


def _saves_whole(run: Run) -> None:
    shapes, n = run.inputs[0][0], run.world_size
    layout = _layout(shapes, n)
    for rank in range(n):
        saved = _saved(run, rank)
        for name in run.inputs[0][1].keys() - {"step"}:
            flat = torch.cat([state[name] for _, state, _ in run.inputs])
            parts = flat[: layout.offsets[-1]].split(layout.numels)
            for i, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
                what = f"{name} of parameter {i}, saved by rank {rank},"
                expect_tensor(saved[i][name], part.view(shape), what)


def _keeps_steps(run: Run) -> None:
    for rank in range(run.world_size):
        _, state, other = run.inputs[rank]
        for i, of_param in enumerate(_saved(run, rank)):
            expect_tensor(of_param["step"], state["step"], f"step of parameter {i}, saved,")
        step = _loaded(run, rank)["step"]
        expect_tensor(step, other[0]["step"], f"step, loaded by rank {rank},")


def _loads_a_shard(run: Run) -> None:
    for rank in range(run.world_size):
        shapes, _, other = run.inputs[rank]
        right = _shard(other, shapes, rank, run.world_size, padding=0.0)
        for name in right.keys() - {"step"}:
            what = f"{name}, loaded by rank {rank} of {run.world_size},"
            expect_tensor(_loaded(run, rank)[name], right[name], what)


def _owns_memory(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        for which in ("saved", "loaded"):
            beyond = seen.result[f"{which} beyond"]
            what = f"what rank {rank} {which} keeps no other bytes alive"
            expect(beyond == 0, what, f"{beyond:,} more")


def _sends_once(run: Run) -> None:
    """(n-1)/n of the padded states, each once."""
    shapes, state, _ = run.inputs[0]
    n, shard_numel = run.world_size, _layout(shapes, run.world_size).shard_numel
    most = (n - 1) * 4 * shard_numel * (len(state) - 1)
    for rank, seen in enumerate(run.ranks):
        sent, calls = seen.result["sent"], seen.result["calls"]
        expect(sent <= most, f"{most:,} bytes at most to save on rank {rank}", f"{sent:,.0f}")
        expect(calls == 0, f"no calls to load on rank {rank}", calls)


LOGICAL_STATES = Exercise(
    name="LogicalStates",
    points=3,
    minutes=20,
    trials=_trials,
    drive=_drive,
    poison=("pdt.zero.states.gather", "pdt.zero.states.scatter"),
    properties=(
        Property(
            "saves one whole tensor for each parameter, in its shape",
            _saves_whole,
            "gather the shards into a flat tensor, leave out the padding, and cut it.",
        ),
        Property(
            "keeps the count of steps",
            _keeps_steps,
            "a state of no dimensions belongs to the whole: save it as it is, and load it so.",
        ),
        Property(
            "loads this rank's shard, padded with zeros",
            _loads_a_shard,
            "lay the whole tensors out for this number of ranks, and take this rank's part.",
        ),
        Property(
            "saves and loads tensors that own their memory",
            _owns_memory,
            "a view keeps the whole buffer alive, in a file as well: clone the part.",
        ),
        Property(
            "sends each state once to save, and nothing to load",
            _sends_once,
            "an all-gather of each sharded state; whoever loads has the whole file.",
        ),
    ),
)
