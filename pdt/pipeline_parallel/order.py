"""Whether a schedule can be run: what each action waits for, and what a rank keeps meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pdt.pipeline_parallel.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Schedule,
)

Done = tuple[str, int, int]  # kind, micro-batch, stage
WHOLE = {FORWARD: 1, BACKWARD: 1}, {FORWARD: 1, INPUT_GRAD: 1, WEIGHT_GRAD: 1}


def waits_for(schedule: Schedule, rank: int, action: Action) -> list[tuple[Done, ...]]:
    """For each thing that must be there before, the actions of which any one makes it."""
    kind, microbatch, stage = action.kind, action.microbatch, schedule.stage(rank, action.chunk)
    if kind == FORWARD:
        return [((FORWARD, microbatch, stage - 1),)] if stage else []
    if kind == WEIGHT_GRAD:
        return [((INPUT_GRAD, microbatch, stage),)]
    own: list[tuple[Done, ...]] = [((FORWARD, microbatch, stage),)]
    if stage == schedule.num_stages - 1:
        return own
    behind = stage + 1
    return [*own, ((BACKWARD, microbatch, behind), (INPUT_GRAD, microbatch, behind))]


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """The actions of all ranks, each after what it waits for, each rank's in its own order.

    Raises ValueError where they cannot be run: who waits for what.
    """
    done: set[Done] = set()
    next_ = [0] * schedule.num_ranks
    went_on = True
    while went_on:
        went_on = False
        for rank, actions in enumerate(schedule.actions):
            while next_[rank] < len(actions) and _is_ready(schedule, rank, actions, next_, done):
                action = actions[next_[rank]]
                next_[rank] += 1
                done.add((action.kind, action.microbatch, schedule.stage(rank, action.chunk)))
                went_on = True
                yield rank, action
    stuck = [
        f"rank {rank} waits to do {actions[next_[rank]]}"
        for rank, actions in enumerate(schedule.actions)
        if next_[rank] < len(actions)
    ]
    if stuck:
        raise ValueError(f"the schedule deadlocks: {'; '.join(stuck)}")


def _is_ready(
    schedule: Schedule,
    rank: int,
    actions: tuple[Action, ...],
    next_: list[int],
    done: set[Done],
) -> bool:
    wanted = waits_for(schedule, rank, actions[next_[rank]])
    return all(any(one in done for one in ways) for ways in wanted)


def check(schedule: Schedule) -> None:
    """ValueError unless every stage takes every micro-batch forward and back once, and it ends."""
    for rank, actions in enumerate(schedule.actions):
        counts: dict[tuple[int, int], Counter[str]] = {
            (chunk, microbatch): Counter()
            for chunk in range(schedule.num_chunks)
            for microbatch in range(schedule.num_microbatches)
        }
        for action in actions:
            if (action.chunk, action.microbatch) not in counts:
                raise ValueError(f"rank {rank} does {action}, which there is not")
            counts[action.chunk, action.microbatch][action.kind] += 1
        for (chunk, microbatch), kinds in counts.items():
            if dict(kinds) not in WHOLE:
                raise ValueError(
                    f"rank {rank} takes micro-batch {microbatch} through chunk {chunk} by "
                    f"{dict(kinds)}: one F is wanted, and one B, or one I and one W"
                )
    for _ in execution_order(schedule):
        pass


def in_flight(schedule: Schedule) -> list[int]:
    """The most activations that each rank keeps at once, of one micro-batch in one stage each.

    They are kept from F until B, or W.
    """
    most = []
    for actions in schedule.actions:
        kept = peak = 0
        for action in actions:
            kept += {FORWARD: 1, BACKWARD: -1, WEIGHT_GRAD: -1}.get(action.kind, 0)
            peak = max(peak, kept)
        most.append(peak)
    return most
