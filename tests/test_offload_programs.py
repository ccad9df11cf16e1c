"""Random programs: checkpoints and offloads around any parts of them change no bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdt.offload import Bus
from pdt.offload.activations import ActivationOffload, offload_activations
from pdt.offload.checkpoint import checkpoint

PROGRAMS = 25  # in each of the tests
Program = list[tuple[str, Any]]  # ("op", its number) or ("checkpoint" or "offload", a program)


def doubled(x: Tensor) -> Tensor:
    y = x + 1
    y.mul_(2)
    return y


def rows(x: Tensor) -> Tensor:
    return x[::2].repeat_interleave(2, 0)[: len(x)]


OPERATIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, w: x.sin(),
    lambda x, w: x @ w,
    lambda x, w: (x @ w.t()).exp().clamp(max=3),
    lambda x, w: x.t(),
    lambda x, w: F.dropout(x, 0.3),
    lambda x, w: x * x.t(),
    lambda x, w: F.relu_(x * 1),
    lambda x, w: rows(x),
    lambda x, w: torch.where(x > 0, x, x * w),
    lambda x, w: F.layer_norm(x, (x.shape[1],)),
    lambda x, w: x.softmax(-1),
    lambda x, w: doubled(x),
    lambda x, w: torch.cat(x.chunk(2, 1)[::-1], 1),
    lambda x, w: x.to(torch.bfloat16).tanh().to(x.dtype),
]


def program(dice: random.Random, length: int, depth: int = 0) -> Program:
    steps: Program = []
    for _ in range(length):
        if depth < 2 and dice.random() < 0.25:
            inside = program(dice, dice.randint(1, 4), depth + 1)
            steps.append((dice.choice(["checkpoint", "offload"]), inside))
        else:
            steps.append(("op", dice.randrange(len(OPERATIONS))))
    return steps


def run(steps: Program, x: Tensor, w: Tensor, offload: ActivationOffload | None) -> Tensor:
    """`offload` None: as if there were no checkpoints and no offloads."""
    for kind, what in steps:
        if kind == "op":
            x = OPERATIONS[what](x, w)
        elif kind == "checkpoint" and offload is not None:
            x = checkpoint(run, what, x, w, offload)
        elif kind == "offload" and offload is not None:
            with offload:
                x = run(what, x, w, offload)
        else:
            x = run(what, x, w, offload)
    return x


def outcome(
    steps: Program, seed: int, twice: bool, offload: ActivationOffload | None
) -> list[Tensor]:
    """The result, the gradients of one or two backward passes, and the next random numbers."""
    torch.manual_seed(seed)
    size = (4, 8, 16)[seed % 3]
    x = torch.randn(size, size, dtype=torch.float64, requires_grad=True)
    w = nn.Parameter(0.3 * torch.randn(size, size, dtype=torch.float64))
    y = run([(("checkpoint", "offload", "plain")[seed % 3], steps)], x * 1, w, offload)
    loss = y.square().sum() + 0 * w.sum()
    grads = list(torch.autograd.grad(loss, [x, w], retain_graph=twice))
    if twice:
        grads += torch.autograd.grad(loss, [x, w])
    return [y.detach(), *grads, torch.rand(2)]


@pytest.mark.parametrize(("prefetch", "window"), [(2, 1), (0, 3)])
@pytest.mark.parametrize("twice", [False, True])
def test_no_bit_changes_in_any_program(prefetch: int, window: int, twice: bool) -> None:
    with Bus() as bus:
        offload = offload_activations(bus, min_nbytes=0, prefetch=prefetch, window=window)
        for seed in range(PROGRAMS):
            dice = random.Random(1000 * prefetch + 100 * twice + seed)
            steps = program(dice, dice.randint(2, 8))
            plain, seen = (outcome(steps, seed, twice, how) for how in (None, offload))
            assert all(map(torch.equal, seen, plain)), steps
        assert bus.calls("to host") > PROGRAMS
        assert bus.calls("to device") > PROGRAMS
