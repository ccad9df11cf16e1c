"""Pipeline schedules as data: what each rank does, in which order, with which micro-batch.

Words: a *stage* is a run of layers; a rank has one *chunk*, or several that are not neighbours, and
each is a stage. An action is F, the forward of a micro-batch through a stage; B, its backward; or B
in two parts: I, the gradient of the stage's input, which the stage before waits for, and W, that of
its weights, for which nobody waits. The letters are those of torch.distributed.pipelining.

Pure: no process group. One list of actions is simulated, drawn, checked and run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = "F", "B", "I", "W"


class Action(NamedTuple):
    """What a rank does with one micro-batch in one of its chunks."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f" of chunk {self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """`actions[rank]` in the order in which the rank takes them.

    Chunk c of rank r is stage c * num_ranks + r: the stages go round the ranks.
    """

    actions: tuple[tuple[Action, ...], ...]
    num_microbatches: int
    num_chunks: int = 1

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        return chunk * self.num_ranks + rank

    def place(self, stage: int) -> tuple[int, int]:
        """The rank and the chunk of a stage."""
        return stage % self.num_ranks, stage // self.num_ranks

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """Every action with its rank."""
        for rank, actions in enumerate(self.actions):
            for action in actions:
                yield rank, action


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: a rank keeps the activations of every micro-batch.

    Huang et al. 2019, section 2.3 (arXiv:1811.06965).
    """
    _check(num_ranks, num_microbatches)
    forwards = [Action(FORWARD, i) for i in range(num_microbatches)]
    backwards = [Action(BACKWARD, i) for i in range(num_microbatches)]
    return Schedule((tuple(forwards + backwards),) * num_ranks, num_microbatches)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B: a rank takes a backward as soon as there is one, so rank r of p keeps p - r at most.

    Narayanan et al. 2019, section 3.2 (arXiv:1806.03377).
    """
    return interleaved(num_ranks, num_microbatches, 1)


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B over several chunks a rank, which divides the bubble by their number.

    Micro-batches go through a chunk in groups of `num_ranks`, so with more than one chunk their
    number must be a multiple of it (ValueError). Narayanan et al. 2021, section 2.2
    (arXiv:2104.04473).
    """
    _check(num_ranks, num_microbatches, num_chunks)
    if num_chunks > 1 and num_microbatches % num_ranks:
        raise ValueError(
            f"num_microbatches={num_microbatches} is not a multiple of num_ranks={num_ranks}, in "
            "groups of which they go through each of several chunks"
        )
    steps = range(num_microbatches * num_chunks)
    forwards = [Action(FORWARD, *_turn(k, num_ranks, num_chunks)) for k in steps]
    backwards = [
        Action(BACKWARD, action.microbatch, num_chunks - 1 - action.chunk) for action in forwards
    ]
    actions = []
    for rank in range(num_ranks):
        after = num_ranks - 1 - rank  # the ranks behind it
        warmup = after if num_chunks == 1 else 2 * after + (num_chunks - 1) * num_ranks
        actions.append(_alternate(forwards, backwards, min(warmup, len(forwards))))
    return Schedule(tuple(actions), num_microbatches, num_chunks)


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1: weight gradients fill the end of 1F1B; a rank keeps no more than its first does.

    Qi et al. 2024, section 2.2 (arXiv:2401.10241).
    """
    return _zero_bubble(num_ranks, num_microbatches, delay=1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H2: forwards fill its beginning too, for about twice the memory.

    Qi et al. 2024, section 2.3 (arXiv:2401.10241).
    """
    return _zero_bubble(num_ranks, num_microbatches, delay=2)


def _turn(k: int, num_ranks: int, num_chunks: int) -> tuple[int, int]:
    """Micro-batch and chunk of the k-th forward: a group of micro-batches takes all chunks."""
    if num_chunks == 1:
        return k, 0
    group, within = divmod(k, num_ranks * num_chunks)
    return group * num_ranks + within % num_ranks, within // num_ranks


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards left."""
    steady = zip(forwards[warmup:], backwards, strict=False)
    pairs = [action for pair in steady for action in pair]
    return (*forwards[:warmup], *pairs, *backwards[len(forwards) - warmup :])


def _zero_bubble(num_ranks: int, num_microbatches: int, delay: int) -> Schedule:
    """In step x rank r of p takes F of x, I of x - delay (p-1-r), and W of x - delay (p-1)."""
    _check(num_ranks, num_microbatches)
    last = num_ranks - 1
    actions = []
    for rank in range(num_ranks):
        lags = {FORWARD: 0, INPUT_GRAD: delay * (last - rank), WEIGHT_GRAD: delay * last}
        steps = range(num_microbatches + delay * last)
        turns = [Action(kind, step - lag) for step in steps for kind, lag in lags.items()]
        actions.append(tuple(a for a in turns if 0 <= a.microbatch < num_microbatches))
    return Schedule(tuple(actions), num_microbatches)


def _check(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
    if min(num_ranks, num_microbatches, num_chunks) < 1:
        raise ValueError(
            f"num_ranks={num_ranks}, num_microbatches={num_microbatches}, num_chunks={num_chunks}: "
            "each must be at least 1"
        )
