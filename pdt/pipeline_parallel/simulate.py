"""How long a schedule takes, from the times of a stage and of a transfer between two."""

from __future__ import annotations

from dataclasses import dataclass

from pdt.measure.timeline import Span, Timeline
from pdt.pipeline_parallel.order import execution_order, waits_for
from pdt.pipeline_parallel.schedule import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Schedule

KINDS = {FORWARD: "forward", BACKWARD: "backward", INPUT_GRAD: "backward", WEIGHT_GRAD: "weights"}


@dataclass(frozen=True)
class Times:
    """Seconds of one micro-batch in one stage, and of its way to the next rank, which takes no
    rank's time. A backward in one piece takes those of both gradients."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    transfer_s: float = 0.0

    def of(self, kind: str) -> float:
        return {
            FORWARD: self.forward_s,
            BACKWARD: self.input_grad_s + self.weight_grad_s,
            INPUT_GRAD: self.input_grad_s,
            WEIGHT_GRAD: self.weight_grad_s,
        }[kind]


@dataclass(frozen=True)
class Simulation:
    """`timeline` has every action of every rank, from 0 s on."""

    timeline: Timeline
    busy_s: float  # of a rank, the same for all

    @property
    def step_s(self) -> float:
        """The longest time from a rank's first action to the end of its last."""
        spans = self.timeline.spans
        longest = 0.0
        for rank in self.timeline.ranks:
            own = [span for span in spans if span.rank == rank]
            longest = max(longest, own[-1].end_s - own[0].start_s)
        return longest

    @property
    def bubble(self) -> float:
        """The share of that time in which the rank is idle; Qi et al. 2024, section 5.3."""
        return 1 - self.busy_s / self.step_s


def simulate(schedule: Schedule, times: Times) -> Simulation:
    """Every action begins when its rank is free and what it waits for is there.

    Raises ValueError for a schedule that deadlocks.
    """
    ends_s: dict[tuple[str, int, int], float] = {}
    free_s = [0.0] * schedule.num_ranks
    spans: list[Span] = []
    for rank, action in execution_order(schedule):
        start_s = free_s[rank]
        for ways in waits_for(schedule, rank, action):
            (made,) = [one for one in ways if one in ends_s]
            way_s = times.transfer_s if schedule.place(made[2])[0] != rank else 0.0
            start_s = max(start_s, ends_s[made] + way_s)
        end_s = free_s[rank] = start_s + times.of(action.kind)
        stage = schedule.stage(rank, action.chunk)
        ends_s[action.kind, action.microbatch, stage] = end_s
        spans.append(Span(str(action), start_s, end_s, "compute", KINDS[action.kind], rank))
    one_s = times.of(FORWARD) + times.of(BACKWARD)
    busy_s = one_s * schedule.num_microbatches * schedule.num_chunks
    return Simulation(Timeline(spans), busy_s)
