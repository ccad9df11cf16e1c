"""What lesson 06's hook must do: send groups of gradients while backward runs, in one order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pdt.comm.cost import Link
from pdt.comm.meter import meter
from pdt.grade.accumulation import ACCUMULATE
from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_tensor
from pdt.grade.exposed import EXPOSED

SLOW = Link(0.05, 1e9)  # a transfer takes far longer than what is left of backward
Groups = list[list[int]]


class Mark(torch.autograd.Function):
    """The identity; its backward calls `note`, when the gradient of the step behind it is there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note()
        return grad, None


def chain(
    params: list[Tensor], factors: list[Tensor], order: list[int], x: Tensor, note: Any
) -> Tensor:
    """A number that uses the parameters in this order; their gradients come in the reverse."""
    for i in order:
        x = (Mark.apply(x, lambda i=i: note(i)) * params[i] * factors[i]).sum()
    return x


def _trials(dice: Dice) -> Iterator[Trial]:
    """One rank whose gradients come out of order; ranks that differ in theirs; a slow wire."""
    groups = [[5, 4], [3], [2, 1], [0]]
    mixed = [[0, 1, 3, 2, 5, 4], [5, 3, 4, 0, 2, 1], [2, 4, 0, 5, 1, 3], [1, 0, 2, 3, 4, 5]]
    straight = list(range(6))
    numels = [7, 3, 4, 5, 2, 6]
    yield _trial(dice, groups, numels, [mixed[1]], "gradients out of order")
    for n in (2, 3, 4):
        alike = [[5, 4], [3, 2], [1, 0]]
        yield _trial(dice, alike, [4] * 6, mixed[:n], "another order of gradients on each rank")
    yield _trial(dice, groups, numels, [straight] * 3, "gradients in the order of the groups")
    yield _trial(dice, groups, numels, [straight] * 2, "a slow wire", link=SLOW, steps=1)


def _trial(
    dice: Dice,
    groups: Groups,
    numels: list[int],
    orders: list[list[int]],
    label: str,
    link: Link | None = None,
    steps: int = 3,
) -> Trial:
    weights = [dice.normal((numel,), torch.float64) for numel in numels]
    inputs = []
    for order in orders:
        batches = [[dice.normal((k,), torch.float64) for k in numels] for _ in range(steps)]
        inputs.append((weights, groups, order, batches))
    return Trial(inputs, label, link=link)


def _drive(
    overlap_hooks: Callable[..., Any],
    weights: list[Tensor],
    groups: Groups,
    order: list[int],
    batches: list[list[Tensor]],
) -> list:
    """By step: the gradients; the calls; by mark, which parameter, how many calls made, ended."""
    params = [nn.Parameter(weight.clone()) for weight in weights]
    overlap_hooks([[params[i] for i in group] for group in groups])
    seen = []
    for factors in batches:
        for param in params:
            param.grad = None
        marks: list[tuple[int, int, int]] = []
        with meter() as m:

            def note(i: int, marks: list = marks, m: Any = m) -> None:
                ended = sum(record.end_s is not None for record in m.records)
                marks.append((i, len(m.records), ended))

            one = torch.ones((), dtype=torch.float64, requires_grad=True)
            chain(list(params), factors, order, one, note).backward()
        grads = [None if param.grad is None else param.grad.clone() for param in params]
        seen.append((grads, [(r.op, r.nbytes) for r in m.records], marks))
    return seen


def _means(run: Run, step: int) -> list[Tensor]:
    total: list[Tensor] = []
    for weights, _, order, batches in run.inputs:
        params = [weight.clone().requires_grad_() for weight in weights]
        one = torch.ones((), dtype=torch.float64, requires_grad=True)
        chain(list(params), batches[step], order, one, lambda i: None).backward()
        own = [param.grad for param in params if param.grad is not None]
        total = [a + b for a, b in zip(total, own, strict=True)] if total else own
    return [grad / run.world_size for grad in total]


def _leaves_the_mean(run: Run) -> None:
    for step in range(len(run.inputs[0][3])):
        means = _means(run, step)
        for rank, seen in enumerate(run.ranks):
            for i, (grad, mean) in enumerate(zip(seen.result[step][0], means, strict=True)):
                what = f"the gradient of parameter {i} on rank {rank} after step {step}"
                expect_tensor(grad, mean, what, rtol=1e-9, atol=1e-12)


def _one_call_each(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        weights, groups = run.inputs[rank][:2]
        wanted = sorted(sum(weights[i].nbytes for i in group) for group in groups)
        for _, calls, _ in seen.result:
            good = {op for op, _ in calls} == {"all_reduce"}
            good = good and sorted(nbytes for _, nbytes in calls) == wanted
            what = ", ".join(f"{op} of {nbytes}" for op, nbytes in calls) or "no call"
            expect(good, f"one all_reduce for each of {len(groups)} groups", what)


def _in_order(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        weights, groups = run.inputs[rank][:2]
        wanted = [sum(weights[i].nbytes for i in group) for group in groups]
        for _, calls, _ in seen.result:
            sent = [nbytes for _, nbytes in calls]
            if sorted(sent) == sorted(wanted):
                expect(sent == wanted, f"groups of {wanted} bytes in this order", sent)


def _early(run: Run) -> None:
    """At each mark but the last: all groups that are ready, and those before them, have left."""
    for rank, seen in enumerate(run.ranks):
        groups = run.inputs[rank][1]
        for step, (_, _, marks) in enumerate(seen.result):
            ready: set[int] = set()
            for i, made, _ in marks[:-1]:
                ready.add(i)
                full = [set(group) <= ready for group in groups]
                due = full.index(False) if False in full else len(full)
                said = f"{made} on rank {rank} in step {step}"
                expect(made >= due, f"{due} calls when parameter {i} has its gradient", said)


def _goes_on(run: Run) -> None:
    if run.trial.link is None:
        return
    for rank, seen in enumerate(run.ranks):
        _, made, ended = seen.result[0][2][-1]
        said = f"all {made} had ended on rank {rank}"
        expect(made == 0 or ended < made, "transfers in flight while backward goes on", said)


OVERLAP_HOOKS = Exercise(
    name="overlap_hooks",
    points=3,
    minutes=30,
    trials=_trials,
    drive=_drive,
    poison=(
        "pdt.ddp.ddp.DDP",
        "pdt.ddp.reducer.Reducer",
        "torch.nn.parallel.DistributedDataParallel",
    ),
    properties=(
        Property(
            "leaves the mean of all ranks in every gradient, in every step",
            _leaves_the_mean,
            "divide by the number of ranks, wait at the end, copy each part back, and set the "
            "counts back for the next backward.",
        ),
        Property(
            "makes one all_reduce for each group",
            _one_call_each,
            "flatten a group's gradients into one tensor, and send it once in every backward.",
        ),
        Property(
            "sends the groups in their order, whatever is ready first",
            _in_order,
            "a full group waits until all groups before it have been sent.",
        ),
        Property(
            "sends a group while backward goes on",
            _early,
            "send from the hook of the gradient that completes the group, not after backward.",
        ),
        Property(
            "does not wait before backward has ended",
            _goes_on,
            "use async_op=True in the hook; wait in a callback of the autograd engine.",
        ),
    ),
)

EXERCISES = (OVERLAP_HOOKS, ACCUMULATE, EXPOSED)
