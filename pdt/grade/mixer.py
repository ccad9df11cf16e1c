"""The model of lesson 11's exercise on a unit, and a run of it that sees what each rank holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdt.comm.meter import meter
from pdt.measure.memory import Ledger

LR = 0.05
NAPS, NAP_S = 8, 2e-3
Note = Callable[[str], None]


class Mark(torch.autograd.Function):
    """The identity, which calls `note` on its way forward and on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Note) -> Tensor:
        ctx.note = note
        note("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note("backward")
        return grad, None


class Mixer(nn.Module):
    """A unit of 2w² + w parameters in float64; in its middle it calls `note`."""

    def __init__(self, width: int, seed: int, note: Note) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        first, second, bias = (
            torch.randn(shape, generator=generator, dtype=torch.float64) / width**0.5
            for shape in ((width, width), (width, width), (width,))
        )
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)
        self.bias, self.note = nn.Parameter(bias), note

    def forward(self, x: Tensor) -> Tensor:
        middle = Mark.apply((x @ self.first).tanh(), self.note)
        return middle @ self.second + self.bias


def train_shards(
    shard_unit: Callable[[nn.Module], Any], width: int, seed: int, count: int, batches: Tensor
) -> dict[str, Any]:
    """Train on the shards; what a rank holds at each moment, what it computes and sends.

    Values are kept as lists, which are none of the ledger's bytes.
    """
    held: list[tuple[str, int]] = []
    steps: list[dict[str, Any]] = []
    with Ledger() as ledger:

        def note(moment: str, naps: int = 0) -> None:
            readings = [sum(ledger.live().values())]
            for _ in range(naps):  # a thread of gloo's may let go a moment later
                time.sleep(NAP_S)
                readings.append(sum(ledger.live().values()))
            held.append((moment, min(readings)))

        units = [Mixer(width, seed + i, note) for i in range(count)]
        shards = [shard_unit(unit) for unit in units]
        first = [shard.detach().tolist() for shard in shards]
        note("built", NAPS)
        for batch in batches:
            x = batch.clone().requires_grad_()
            with meter() as m:
                y = nn.Sequential(*units)(x)
                note("between", NAPS)
                y.sum().backward()
                note("after", NAPS)
            grads = [None if shard.grad is None else shard.grad.tolist() for shard in shards]
            with torch.no_grad():
                for shard in shards:
                    shard -= 0 if shard.grad is None else LR * shard.grad
                    shard.grad = None
            values = {"y": y.tolist(), "x": None if x.grad is None else x.grad.tolist()}
            steps.append(values | {"grads": grads, "sent": m.total().wire_nbytes})
            del x, y
        note("end", NAPS)
    dist.barrier()
    return {"held": held, "steps": steps, "first": first}
