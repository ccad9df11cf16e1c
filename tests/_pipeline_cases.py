"""The models of the pipeline tests, cut into stages, and one process that does the same work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pdt.pipeline_parallel import (
    Pipeline,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
)

DIM = 4
SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": lambda p, m: interleaved(p, m, 2),
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
}


def plain(num_stages: int) -> list[nn.Module]:
    return [
        nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, DIM), nn.LayerNorm(DIM))
        for _ in range(num_stages)
    ]


class Start(nn.Module):
    """Tokens -> (x, mask, tokens, None): float, bool, int and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, DIM)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, tokens: Tensor, scale: Tensor) -> tuple[Tensor | None, ...]:
        x = self.embedding(tokens) * scale
        return x, tokens > 1, tokens, None


class Middle(nn.Module):
    """A weight used twice, one that joins behind the input's path, an output of weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.beside = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor, mask: Tensor, tokens: Tensor, more: Any) -> tuple[Any, ...]:
        assert mask.dtype == torch.bool
        assert tokens.dtype == torch.int64
        x = torch.tanh(self.inner(torch.tanh(self.inner(x)))) + self.beside.square()
        beside = self.beside.exp() if more is None else more * self.beside
        return x.masked_fill(mask[..., None], 0.5), mask, tokens, beside


class Pass(nn.Module):
    """No parameter; an input that it does not use."""

    def forward(self, x: Tensor, mask: Tensor, tokens: Tensor, more: Any) -> tuple[Any, ...]:
        return x * 2, mask, tokens, None if more is None else more + 0.0


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, mask: Tensor, tokens: Tensor, more: Any) -> Tensor:
        y = self.out(x) * tokens[..., None]
        return y if more is None else y + more


def cruel(num_stages: int) -> list[nn.Module]:
    if num_stages == 1:
        return [Whole()]
    middle = [(Middle, Pass)[i % 2]() for i in range(num_stages - 2)]
    return [Start(), *middle, End()]


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Start(), Middle(), End()])

    def forward(self, *values: Any) -> Any:
        return in_turn(list(self.parts), values)


def frozen(num_stages: int) -> list[nn.Module]:
    stages = plain(num_stages)
    (stages[0] if num_stages > 1 else stages[0][0]).requires_grad_(False)  # type: ignore[index]
    return stages


MODELS = {"plain": plain, "cruel": cruel, "frozen": frozen}


def make(name: str, num_stages: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [stage.double() for stage in MODELS[name](num_stages)]


def batch(name: str, size: int, step: int = 0) -> tuple[tuple[Tensor, ...], Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (size, 3, DIM)
    target = torch.randn(shape, dtype=torch.float64, generator=generator)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    if name != "cruel":
        return (x,), target
    return (torch.randint(0, 5, shape[:2], generator=generator), x[..., :1]), target


def in_turn(stages: list[nn.Module], values: Any) -> Any:
    for stage in stages:
        values = stage(*values) if isinstance(values, tuple) else stage(values)
    return values


def train_alone(
    name: str, num_stages: int, size: int, steps: int
) -> tuple[list[float], list[Tensor]]:
    """Losses and the parameters after all steps."""
    stages = make(name, num_stages)
    optimizer = torch.optim.SGD(nn.ModuleList(stages).parameters(), 0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        inputs, target = batch(name, size, step)
        loss = mse_loss(in_turn(stages, inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for stage in stages for p in stage.parameters()]


def own(stages: list[nn.Module], schedule: Schedule, rank: int) -> list[nn.Module]:
    return [stages[schedule.stage(rank, chunk)] for chunk in range(schedule.num_chunks)]


def build(name: str, schedule: Schedule, **settings: Any) -> Pipeline:
    """This rank's part of the model."""
    stages = make(name, schedule.num_stages)
    rank = dist.get_rank(settings.get("group"))
    return Pipeline(own(stages, schedule, rank), schedule, mse_loss, **settings)


def train(name: str, schedule: Schedule, size: int, steps: int) -> tuple[Any, dict[int, Any]]:
    """Losses (None but on the last rank), and by stage the parameters after all steps."""
    pipeline = build(name, schedule)
    params = [p for chunk in pipeline.chunks for p in chunk.parameters()]
    frozen_all = not any(p.requires_grad for p in params)
    optimizer = None if not params or frozen_all else torch.optim.SGD(params, 0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        inputs, target = batch(name, size, step)
        if optimizer is not None:
            optimizer.zero_grad()
        loss = pipeline.step(*inputs, target=target)
        if optimizer is not None:
            optimizer.step()
        losses.append(None if loss is None else loss.item())
    held = {
        schedule.stage(pipeline.rank, c): [p.detach() for p in chunk.parameters()]
        for c, chunk in enumerate(pipeline.chunks)
    }
    return losses, held
