"""Zero1 and Zero2 equal one process, step by step, on every rank, and hold what they promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

SEED, SAMPLES, STEPS = 7, 12, 4


class Cruel(nn.Module):
    """Tied, frozen, transposed, 0-dim, empty and unused, all in one small model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.transposed = nn.Parameter(torch.randn(3, 5).t())  # strides (1, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x)) * self.scale
        x = self.frozen(torch.tanh(self.tied(x)))
        return x @ self.transposed + self.empty.sum()


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 3)
    )


MODELS = {"mlp": _mlp, "cruel": Cruel}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.05}),
    "fused": (torch.optim.AdamW, {"lr": 0.05, "fused": True}),
}


def _make(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(SEED)
    return MODELS[name]().to(dtype)


def _samples(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int
) -> list[Tensor]:
    """The parameters after each of STEPS steps."""
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(_samples(step)[rank::world_size]).square().mean().backward()
        optimizer.step()
        history += [p.detach().clone() for p in model.parameters()]
    return history


def _train_sharded(stage: int, model_name: str, optimizer_name: str, cap: float) -> list[Tensor]:
    from pdt.zero import Zero1, Zero2

    model = _make(model_name)
    if dist.get_rank():  # rank 0's values count
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.add_(1.0)
    cls, settings = OPTIMIZERS[optimizer_name]
    make = (Zero1, Zero2)[stage - 1]
    strides = [param.stride() for param in model.parameters()]
    optimizer = make(model.parameters(), cls, bucket_cap_mb=cap, **settings)
    assert [param.stride() for param in model.parameters()] == strides
    return _train(model, optimizer, dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("model_name", "optimizer_name", "cap"),
    [
        ("mlp", "adamw", 25.0),
        ("mlp", "momentum", 0.0),
        ("cruel", "adamw", 0.0),
        ("cruel", "nadam", 25.0),
        ("cruel", "fused", 0.0001),
    ],
)
def test_equals_one_process(
    pool: Any, world_size: int, stage: int, model_name: str, optimizer_name: str, cap: float
) -> None:
    model = _make(model_name)
    cls, settings = OPTIMIZERS[optimizer_name]
    expected = _train(model, cls(model.parameters(), **settings), 0, 1)
    for found in pool(world_size).run(_train_sharded, stage, model_name, optimizer_name, cap):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
