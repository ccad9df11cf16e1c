"""Lesson 13's exercise on the delayed update: the host steps while the device goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect_int, expect_tensor
from pdt.grade.fake_host import FakeHost

FRESH, IN_PLACE = "zero_grad frees", "zero_grad writes zeros in place"
STEPS = 7


def _trials(dice: Dice) -> Iterator[Trial]:
    """`flush_at`: before which step somebody saves a checkpoint."""
    for warmup, flush_at, label in (
        (0, 99, FRESH),
        (2, 99, FRESH),
        (3, 5, FRESH),
        (STEPS, 99, FRESH),
        (0, 4, IN_PLACE),
    ):
        shapes = [(dice.integer(2, 5), dice.integer(2, 5)) for _ in range(3)]
        values = [dice.normal(shape, torch.float64) for shape in shapes]
        targets = [[dice.normal(s, torch.float64) for s in shapes] for _ in range(STEPS)]
        title = f"{label}, warm-up of {warmup}"
        yield Trial([(values, targets, warmup, flush_at, label == IN_PLACE)], title)


class Job:
    """Reads its gradients when it is waited for: until then they must stay as they are."""

    def __init__(self, host: LateHost, grads: list[Tensor]) -> None:
        self._host, self._grads, self.new = host, grads, list[Tensor]()

    def wait(self) -> list[Tensor]:
        """The new values of all parameters; at once when it has been waited for before."""
        if not self.new:
            self.new = [self._host.step(i, grad) for i, grad in enumerate(self._grads)]
            self._host.under_way = 0
        return self.new


class LateHost(FakeHost):
    """One job at a time, for all parameters."""

    started = under_way = 0

    def start(self, grads: list[Tensor]) -> Job:
        if self.under_way:
            raise RuntimeError("the host is busy: wait for the job before")
        self.started, self.under_way = self.started + 1, 1
        return Job(self, list(grads))


def _gradient(param: Tensor, target: Tensor) -> Tensor:
    return param.detach() - target


@torch.no_grad()
def _backward(params: list[nn.Parameter], targets: list[Tensor], in_place: bool) -> None:
    """As a loop does: gradients are cleared, then added up."""
    for param, target in zip(params, targets, strict=True):
        if param.grad is not None and in_place:
            param.grad.zero_().add_(_gradient(param, target))
        else:
            param.grad = _gradient(param, target)


def _drive(
    learner: Callable[..., Any],
    values: list[Tensor],
    targets: list[list[Tensor]],
    warmup: int,
    flush_at: int,
    in_place: bool,
) -> dict[str, Any]:
    params = [nn.Parameter(value.clone()) for value in values]
    host = LateHost(params)
    delayed, seen, flushes = learner(params, host, warmup), [], []
    for step in range(len(targets)):
        if step == flush_at:
            flushes.append(_flush(delayed, params, host))
        under_way = host.under_way  # while the device computes
        _backward(params, targets[step], in_place)
        delayed.step()
        seen.append([under_way, host.started, [p.detach().clone() for p in params]])
    flushes += [_flush(delayed, params, host), _flush(delayed, params, host)]
    return {"steps": seen, "flushes": flushes}


def _flush(delayed: Any, params: list[nn.Parameter], host: LateHost) -> list[Any]:
    delayed.flush()
    now = [param.detach().clone() for param in params]
    return [host.under_way, now, [master.clone() for master in host.masters]]


def _expected(run: Run) -> list[list[Tensor]]:
    """The parameters after each step: late ones are the host's of the step before."""
    values, targets, warmup, flush_at, _ = run.inputs[0]
    host, shown, after = FakeHost(values), [value.clone() for value in values], []
    for step in range(len(targets)):
        if step == flush_at:
            shown = [master.clone() for master in host.masters]
        grads = [_gradient(p, t) for p, t in zip(shown, targets[step], strict=True)]
        before = [master.clone() for master in host.masters]
        new = [host.step(i, grad) for i, grad in enumerate(grads)]
        shown = new if step < warmup else before
        after.append(shown)
    return after


def _values(in_place: bool, is_late: bool) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        _, _, warmup, _, was_in_place = run.inputs[0]
        for step, expected in enumerate(_expected(run)):
            if was_in_place == in_place and (step >= warmup) == is_late:
                seen = run.ranks[0].result["steps"][step][2]
                for i, param in enumerate(expected):
                    expect_tensor(seen[i], param, f"parameter {i} after step {step}")

    return check


def _handed_over(run: Run) -> None:
    for is_late in (False, True):
        _values(True, is_late)(run)


def _works_meanwhile(run: Run) -> None:
    """A job is under way while the device computes, from the step after the first late one on."""
    _, targets, warmup, flush_at, _ = run.inputs[0]
    for step in range(len(targets)):
        expected = int(step > warmup and step != flush_at)
        under_way, started, _ = run.ranks[0].result["steps"][step]
        what = f"the jobs under way while the device computes step {step}"
        expect_int(under_way, expected, what)
        expect_int(started, step + 1, f"the jobs started by the end of step {step}")


def _flushes(run: Run) -> None:
    for under_way, params, masters in run.ranks[0].result["flushes"]:
        expect_int(under_way, 0, "the jobs under way after flush")
        for i, (param, master) in enumerate(zip(params, masters, strict=True)):
            expect_tensor(param, master, f"parameter {i} after flush")


DELAYED_UPDATE = Exercise(
    name="DelayedUpdate",
    points=3,
    minutes=25,
    trials=_trials,
    drive=_drive,
    poison=("pdt.offload.optimizer.OffloadedOptimizer", "pdt.offload.late.Late"),
    properties=(
        Property(
            "updates at once during the warm-up",
            _values(False, False),
            "in the first `warmup` steps, start the job and wait for it in the same step.",
        ),
        Property(
            "applies each later update one step late",
            _values(False, True),
            "step t first takes what was started in step t - 1, then starts its own job.",
        ),
        Property(
            "lets the host work while the device computes",
            _works_meanwhile,
            "start a job in each step, and wait for it in the next one.",
        ),
        Property(
            "hands the gradients over to the host",
            _handed_over,
            "the job reads them later: set .grad to None, so that the loop cannot write there.",
        ),
        Property(
            "flushes what is pending, once",
            _flushes,
            "flush waits for the job, writes its values, and forgets it.",
        ),
    ),
)
