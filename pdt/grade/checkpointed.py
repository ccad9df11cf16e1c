"""Lesson 12's exercise on checkpointing: forget, run again with the same random numbers, free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_int, expect_tensor
from pdt.measure.memory import Ledger

KINDS = (
    "a layer with dropout",
    "two tensors, a number and two results",
    "an input without a gradient",
    "one layer twice, one call inside another",
    "a graph that is used twice",
    "five layers in a row",
)
PART_OF_PEAK = 0.75  # without a checkpoint all five layers' tensors are there
SLACK_NBYTES = 16_384  # a random state takes 5,056 bytes, and a call may keep some
ROW, TWICE = "five layers in a row", "a graph that is used twice"
NESTED = "one layer twice, one call inside another"


class Layer(nn.Module):
    """Keeps some six times its input; dropout between two products and at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, dtype=torch.float64)
        self.down = nn.Linear(2 * width, width, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.up(x).tanh(), 0.3)
        return x + nn.functional.dropout(self.down(hidden), 0.2)


def _trials(dice: Dice) -> Iterator[Trial]:
    for kind in KINDS:
        sizes = dice.integer(90, 120), dice.integer(40, 60), dice.integer(1, 10**6)
        yield Trial([(kind, *sizes)], kind)


class _Case:
    """A model, and a forward in which every checkpointed function counts its runs."""

    def __init__(self, kind: str, rows: int, width: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.kind = kind
        self.layers = nn.ModuleList(Layer(width) for _ in range(5 if kind == ROW else 1))
        self.x = torch.randn(rows, width, dtype=torch.float64)
        self.x.requires_grad_(kind != "an input without a gradient")
        self.scale = torch.ones(width, dtype=torch.float64, requires_grad=True)
        self.runs = 0

    def counted(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.runs += 1
            return fn(*args)

        return run

    def forward(self, call: Callable[..., Any]) -> list[Tensor]:
        layer = self.counted(self.layers[0])
        if self.kind.startswith("two tensors"):
            return list(call(self.counted(_two_results), self.x, self.scale, 0.5))
        if self.kind == NESTED:
            return [call(self.counted(lambda x: call(layer, self.layers[0](x))), self.x)]
        x = self.x
        for each in self.layers:
            x = call(self.counted(each), x)
        return [x]


def _two_results(x: Tensor, scale: Tensor, number: float) -> tuple[Tensor, Tensor]:
    dropped = nn.functional.dropout((x * scale).sin(), number)
    return dropped.exp(), (dropped * number).cos()


def _drive(call: Callable[..., Any], kind: str, rows: int, width: int, seed: int) -> dict:
    """What a checkpointed forward and backward did, as plain data."""
    case = _Case(kind, rows, width, seed)
    torch.manual_seed(seed + 1)
    with Ledger(case.layers) as ledger:
        for leaf in _leaves(case):
            leaf.detach().sum()  # so that the ledger knows it
        before = _total(ledger)
        results = case.forward(call)
        before += sum(y.nbytes for y in results)
        kept, forward_runs, stream = _total(ledger) - before, case.runs, torch.get_rng_state()
        after = len(ledger.timeline)
        _backward(results, retain_graph=kind == TWICE)
        held = _total(ledger) - before - _grads_nbytes(case)
        peak = max(sum(kinds.values()) for _, kinds in ledger.timeline[after:]) - before
        if kind == TWICE:
            _backward(results)
    return {
        "results": [y.detach() for y in results],
        "grads": [leaf.grad for leaf in _leaves(case)],
        "nbytes": {"kept": kept, "held": held, "peak": peak},
        "runs": (forward_runs, case.runs - forward_runs),
        "streams": (stream, torch.get_rng_state()),
    }


def _backward(results: list[Tensor], retain_graph: bool = False) -> None:
    loss = torch.stack([y.square().sum() for y in results]).sum()
    loss.backward(retain_graph=retain_graph)


def _leaves(case: _Case) -> list[Tensor]:
    return [case.x, case.scale, *case.layers.parameters()]


def _total(ledger: Ledger) -> int:
    return sum(ledger.live().values())


def _grads_nbytes(case: _Case) -> int:
    return sum(leaf.grad.nbytes for leaf in _leaves(case) if leaf.grad is not None)


def _plain(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


@cache
def _without(*inputs: Any) -> dict[str, Any]:
    """The same without a checkpoint."""
    return _drive(_plain, *inputs)


def _same_results(run: Run) -> None:
    wanted = _without(*run.inputs[0])["results"]
    for i, (y, right) in enumerate(zip(run.ranks[0].result["results"], wanted, strict=True)):
        expect_tensor(y, right, f"result {i}")


def _same_gradients(run: Run) -> None:
    seen, wanted = run.ranks[0].result, _without(*run.inputs[0])
    for i, (grad, right) in enumerate(zip(seen["grads"], wanted["grads"], strict=True)):
        if right is None:
            expect(grad is None, f"no gradient of leaf {i}", "one")
        else:
            expect_tensor(grad, right, f"the gradient of leaf {i}")


def _runs_once_more(run: Run) -> None:
    kind = run.inputs[0][0]
    forward, backward = run.ranks[0].result["runs"]
    wanted, _ = _without(*run.inputs[0])["runs"]
    expect_int(forward, wanted, "runs in forward")
    more = wanted + (kind == NESTED)  # the outer call runs the inner one again
    more *= 1 + (kind == TWICE)
    expect_int(backward, more, "runs in backward")


def _stream(run: Run) -> None:
    after_forward, after_backward = run.ranks[0].result["streams"]
    wanted, _ = _without(*run.inputs[0])["streams"]
    text = "the random state that fn leaves behind"
    expect(torch.equal(after_forward, wanted), text, "another one after forward")
    expect(torch.equal(after_backward, wanted), text, "another one after backward")


def _keeps_arguments(run: Run) -> None:
    """Beside arguments, parameters and results; what lies between two calls is an argument."""
    kind, rows, width, _ = run.inputs[0]
    between = {ROW: 4, NESTED: 1}.get(kind, 0) * rows * width * 8
    kept, plain = (
        seen["nbytes"]["kept"] - between for seen in (run.ranks[0].result, _without(*run.inputs[0]))
    )
    wanted = f"next to nothing besides the arguments (without a checkpoint {plain:,} bytes)"
    expect(kept <= SLACK_NBYTES, wanted, f"{kept:,} bytes after forward")


def _frees(run: Run) -> None:
    nbytes = run.ranks[0].result["nbytes"]
    held, peak = nbytes["held"], nbytes["peak"]
    expect(held <= SLACK_NBYTES, "nothing left after backward", f"{held:,} bytes")
    if run.inputs[0][0] == ROW:
        bound = round(_without(*run.inputs[0])["nbytes"]["peak"] * PART_OF_PEAK)
        wanted = f"a peak in backward below {bound:,} bytes: the tensors of one layer"
        expect(peak <= bound, wanted, f"{peak:,}")


CHECKPOINT = Exercise(
    name="checkpoint",
    points=3,
    minutes=30,
    trials=_trials,
    drive=_drive,
    poison=("pdt.offload.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint"),
    properties=(
        Property(
            "returns what fn returns",
            _same_results,
            "forward is a call of fn(*args), under hooks.",
        ),
        Property(
            "gives the gradients of the first run, to the bit",
            _same_gradients,
            "the second run must draw the same random numbers: save the state before the first, "
            "set it before the second.",
        ),
        Property(
            "runs fn once in forward and once in backward",
            _runs_once_more,
            "the first tensor that is asked for brings back all of them; hand them out by number.",
        ),
        Property(
            "leaves the random stream alone",
            _stream,
            "torch.random.fork_rng(devices=[]) around the second run puts back what was there.",
        ),
        Property(
            "keeps the arguments alone",
            _keeps_arguments,
            "pack must return something small, a number, and nothing else may hold the tensors.",
        ),
        Property(
            "frees what it brought back as backward uses it",
            _frees,
            "pop each tensor when it is handed out; keep them by call, not for all calls together.",
        ),
    ),
)
