"""Lesson 13's exercise on the way of a step: gradients leave in backward, parameters come back
while the host goes on. Judged by bytes, by what the device holds, and by the order of events."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_int, expect_tensor
from pdt.grade.fake_host import TO_DEVICE, TO_HOST, FakeBus, FakeHost

DTYPE = torch.bfloat16
MOST = 3  # gradients on the device: two on their way and the one that has just come
ONE, SEVERAL, UNUSED = "one backward a step", "several backwards a step", "unused parameters"
Steps = list[list[dict[int, Tensor]]]  # by step, by backward: the gradient of each used parameter


def _trials(dice: Dice) -> Iterator[Trial]:
    for label, parts in ((ONE, [1, 1, 1]), (SEVERAL, [3, 1, 4])):
        shapes = _shapes(dice, dice.integer(5, 7))
        every = list(range(len(shapes)))
        yield _trial(dice, shapes, [[every] * k for k in parts], label)
    shapes = _shapes(dice, 6)
    used = [[[0, 1, 2, 3, 4, 5]], [[0, 2, 5]], [[1, 2, 3, 4]], [[0, 1, 2, 3, 4, 5]]]
    yield _trial(dice, shapes, used, UNUSED)
    yield _trial(dice, _shapes(dice, 1), [[[0]]] * 3, ONE)


def _shapes(dice: Dice, count: int) -> list[tuple[int, int]]:
    return [(dice.integer(2, 4), 10 + i) for i in range(count)]


def _trial(
    dice: Dice, shapes: list[tuple[int, int]], used: list[list[list[int]]], label: str
) -> Trial:
    values = [dice.normal(shape, DTYPE) for shape in shapes]
    steps = [[{i: dice.normal(shapes[i], DTYPE) for i in part} for part in parts] for parts in used]
    return Trial([(values, steps)], label)


class Layer(torch.autograd.Function):
    """The identity of x, whose backward gives `param` the gradient that it is told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, ctx.grad.clone(), None


class RecordingHost(FakeHost):
    """Also notes how many returns have begun, and how many are under way, when it steps."""

    def __init__(self, params: list[nn.Parameter], bus: FakeBus) -> None:
        super().__init__(params)
        self._bus, self.returns = bus, list[list[int]]()

    def step(self, i: int, grad: Tensor) -> Tensor:
        self.returns.append([self._bus.calls[TO_DEVICE], len(self._bus.under_way[TO_DEVICE])])
        return super().step(i, grad)


class Device:
    """Parameters; at each new gradient, how many there are and how many have been sent."""

    def __init__(self, values: list[Tensor], bus: FakeBus) -> None:
        self.params, self._bus = [nn.Parameter(value.clone()) for value in values], bus
        self.held, self.sent = list[int](), list[int]()
        self._grads: list[weakref.ref[Tensor]] = []
        for param in self.params:
            param.register_post_accumulate_grad_hook(self._new)

    def _new(self, param: Tensor) -> None:
        assert param.grad is not None
        self._grads.append(weakref.ref(param.grad))
        alive = [grad for each in self._grads if (grad := each()) is not None]
        moving = [source for way in self._bus.under_way[TO_HOST] for source, _ in way.pairs]
        self.held.append(len({tensor.data_ptr() for tensor in alive + moving}))
        self.sent.append(self._bus.calls[TO_HOST])

    def backward(self, grads: dict[int, Tensor]) -> None:
        x = torch.zeros((), requires_grad=True)
        for i, grad in grads.items():
            x = Layer.apply(x, self.params[i], grad)
        x.backward()


def _drive(learner: Callable[..., Any], values: list[Tensor], steps: Steps) -> dict[str, Any]:
    bus = FakeBus()
    device = Device(values, bus)
    host = RecordingHost(device.params, bus)
    offloaded, seen = learner(device.params, host, bus), []
    for parts in steps:
        for grads in parts:
            device.backward(grads)
        offloaded.step()
        seen.append(
            {
                "masters": [master.clone() for master in host.masters],
                "params": [param.detach().clone() for param in device.params],
                "up": bus.nbytes[TO_HOST],
                "down": bus.nbytes[TO_DEVICE],
                "returns": [list(each) for each in host.returns],
                "held": list(device.held),
                "sent": list(device.sent),
            }
        )
        _clear(bus, host, device)
    return {"steps": seen, "grads": sum(param.grad is not None for param in device.params)}


def _clear(bus: FakeBus, host: RecordingHost, device: Device) -> None:
    for counts in (bus.nbytes, bus.calls):
        counts.update(dict.fromkeys(counts, 0))
    for notes in (host.returns, device.held, device.sent):
        notes.clear()


def _expected(run: Run) -> list[list[Tensor]]:
    """The masters after each step."""
    values, steps = run.inputs[0]
    host, masters = FakeHost(values), []
    for parts in steps:
        for i in sorted({i for grads in parts for i in grads}):
            host.step(i, sum((g[i].float() for g in parts if i in g), torch.zeros(())))
        masters.append([master.clone() for master in host.masters])
    return masters


def _values(label: str) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        if run.trial.label != label:
            return
        for step, masters in enumerate(_expected(run)):
            seen = run.ranks[0].result["steps"][step]
            for i, master in enumerate(masters):
                what = f"the host's parameter {i} after step {step}"
                expect_tensor(seen["masters"][i], master, what, rtol=1e-5, atol=1e-5)
                what = f"the device's parameter {i} after step {step}"
                expect_tensor(seen["params"][i], seen["masters"][i].to(DTYPE), what)

    return check


def _carries_two_bytes(run: Run) -> None:
    values, steps = run.inputs[0]
    for step, parts in enumerate(steps):
        seen = run.ranks[0].result["steps"][step]
        each = {i: values[i].nbytes for grads in parts for i in grads}
        most = sum(values[i].nbytes for grads in parts for i in grads)
        least, bounds = sum(each.values()), f"{most:,} bytes to the host in step {step}"
        expect(least <= seen["up"] <= most, bounds, f"{seen['up']:,}")
        expect_int(seen["down"], least, f"the bytes to the device in step {step}")


def _leaves_in_backward(run: Run) -> None:
    """When a gradient comes, the one before has been sent; after a step, none is left."""
    for step, parts in enumerate(run.inputs[0][1]):
        sent = run.ranks[0].result["steps"][step]["sent"]
        for k in range(sum(map(len, parts))):
            expect(sent[k] >= k, f"{k} sent when gradient {k} of step {step} comes", f"{sent[k]}")
    left = run.ranks[0].result["grads"]
    expect(left == 0, "no .grad after the step", f"{left} of them")


def _holds_few(run: Run) -> None:
    for step, seen in enumerate(run.ranks[0].result["steps"]):
        most = max(seen["held"])
        expect(most <= MOST, f"{MOST} gradients at most on the device", f"{most} in step {step}")


def _returns_early(run: Run) -> None:
    for step, seen in enumerate(run.ranks[0].result["steps"]):
        for k, (begun, under_way) in enumerate(seen["returns"]):
            when = f"when the host makes update {k} of step {step}"
            expect(begun == k, f"{k} returns begun {when}", f"{begun}")
            expect(
                under_way > 0 or k == 0, f"the last return under way {when}", "it was waited for"
            )


def _picture(run: Run) -> str:
    seen = run.ranks[0].result["steps"][0]
    return (
        f"step 0: gradients on the device as each came: {seen['held']}\n"
        f"sent by then: {seen['sent']}\n"
        f"returns begun and under way at each update of the host: {seen['returns']}"
    )


OFFLOADED_STEP = Exercise(
    name="OffloadedStep",
    points=4,
    minutes=30,
    trials=_trials,
    drive=_drive,
    poison=("pdt.offload.optimizer.OffloadedOptimizer", "pdt.offload.arrivals.Arrivals"),
    properties=(
        Property(
            "steps each parameter by its gradient",
            _values(ONE),
            "wait for a transfer before you read what it brings, and for all returns at the end.",
        ),
        Property(
            "adds up several backwards in fp32",
            _values(SEVERAL),
            "the second gradient of a step is added to the first, on the host, as floats.",
        ),
        Property(
            "leaves a parameter without a gradient alone",
            _values(UNUSED),
            "go through what has come, not through all parameters, and forget it after the step.",
        ),
        Property(
            "carries 2 bytes a parameter each way",
            _carries_two_bytes,
            "send the gradient as it is, in 16 bits, and return what the host returns.",
        ),
        Property(
            "lets gradients leave during backward",
            _leaves_in_backward,
            "send in a hook of register_post_accumulate_grad_hook, and set .grad to None there.",
            _picture,
        ),
        Property(
            "holds three gradients at most on the device",
            _holds_few,
            "if two are under way, wait for the oldest before you send the next; keep no .grad.",
            _picture,
        ),
        Property(
            "returns a parameter while the host steps the next",
            _returns_early,
            "begin each return at once, and wait for all of them when the host is through.",
            _picture,
        ),
    ),
)
