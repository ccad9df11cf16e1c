"""fully_shard equals one process, step by step, on every rank, and holds and sends what it says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

SEED, SAMPLES, STEPS = 7, 12, 4


class Block(nn.Module):
    """Frozen, transposed, 0-dim, empty, unused, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.transposed = nn.Parameter(torch.randn(5, 7).t())  # strides (1, 7)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(torch.tanh(self.up(x) * self.scale))
        return x + torch.tanh(hidden @ self.transposed + self.empty.sum())


class Cruel(nn.Module):
    """A weight tied across units, a block used twice, a unit that is frozen, one of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.one = nn.PReLU()
        self.head = nn.Linear(5, 6, bias=False)
        self.head.weight = self.embed.weight
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = self.frozen(block(x))
        return self.head(self.one(x)) + self.shift


def _mlp() -> nn.Module:
    sizes = [5, 40, 20, 6]
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(nn.Embedding(6, 5), *layers)


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": _mlp, "cruel": Cruel}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "fused": (torch.optim.AdamW, {"lr": 0.05, "fused": True}),
}


def _make(name: str) -> nn.Module:
    torch.manual_seed(SEED)
    return MODELS[name]().double()


def _units(model: nn.Module) -> list[nn.Module]:
    """All that becomes a unit, the root last."""
    if isinstance(model, Cruel):
        return [model.embed, *model.blocks, model.frozen, model.one, model.head, model]
    return [*model.children(), model]


def _shard(model: nn.Module, **settings: Any) -> nn.Module:
    from pdt.zero import fully_shard

    for module in _units(model):
        fully_shard(module, **settings)
    return model


def _tokens(step: int) -> Tensor:
    return torch.randint(6, (SAMPLES, 3), generator=torch.Generator().manual_seed(step))


def _whole(model: nn.Module) -> list[Tensor]:
    from pdt.zero.zero3 import gathered

    with gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    world_size: int,
    read: Callable[[nn.Module], list[Tensor]],
) -> list[Tensor]:
    """The losses and the parameters after each of STEPS steps."""
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(_tokens(step)[rank::world_size]).square().mean()
        loss.backward()
        optimizer.step()
        history += read(model)
    return history


def _train_sharded(
    model_name: str, optimizer_name: str, reshard: bool, prefetch: int
) -> list[Tensor]:
    from pdt.zero.zero3 import set_prefetch

    model = _make(model_name)
    if dist.get_rank():  # rank 0's values count
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
    _shard(model, reshard_after_forward=reshard)
    set_prefetch(model, prefetch)
    cls, settings = OPTIMIZERS[optimizer_name]
    optimizer = cls(model.parameters(), **settings)
    return _train(model, optimizer, dist.get_rank(), dist.get_world_size(), _whole)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("model_name", "optimizer_name", "reshard"),
    [
        ("mlp", "adamw", True),
        ("mlp", "momentum", False),
        ("cruel", "adamw", True),
        ("cruel", "momentum", False),
        ("cruel", "fused", True),
    ],
)
def test_equals_one_process(
    pool: Any, world_size: int, model_name: str, optimizer_name: str, reshard: bool
) -> None:
    model = _make(model_name)
    cls, settings = OPTIMIZERS[optimizer_name]

    def read(model: nn.Module) -> list[Tensor]:
        return [p.detach().clone() for p in model.parameters()]

    expected = _train(model, cls(model.parameters(), **settings), 0, 1, read)
    found = pool(world_size).run(_train_sharded, model_name, optimizer_name, reshard, 1)
    for history in found:
        for ours, theirs in zip(history, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("model_name", ["mlp", "cruel"])
def test_prefetch_changes_no_bit(pool: Any, model_name: str, backend: str) -> None:
    ranks = pool(2, backend=backend)
    none = ranks.run(_train_sharded, model_name, "adamw", True, 0)
    for prefetch in (1, 2, 9):
        for ours, theirs in zip(
            ranks.run(_train_sharded, model_name, "adamw", True, prefetch), none, strict=True
        ):
            assert all(map(torch.equal, ours, theirs))
    for ours, theirs in zip(
        none, pool(2).run(_train_sharded, model_name, "adamw", True, 1), strict=True
    ):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)  # of the other backend


def test_parameters_stay_the_same_objects_with_their_strides(pool: Any) -> None:
    def run() -> None:
        from pdt.zero.zero3 import gathered

        model = _make("cruel")
        before, forms = (
            list(model.parameters()),
            [(p.shape, p.stride()) for p in model.parameters()],
        )
        names = [name for name, _ in model.named_parameters()]
        _shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(_tokens(0)).sum().backward()
            optimizer.step()
            assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert names == [name for name, _ in model.named_parameters()]
        assert model.head.weight is model.embed.weight
        with gathered(model):
            assert forms == [(p.shape, p.stride()) for p in model.parameters()]

    pool(2).run(run)


def _numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_sends_three_times_the_parameters(pool: Any, world_size: int) -> None:
    """Exactly 3 (n-1)/n of their bytes, and the agreement's flags; 2 (n-1)/n where they stay."""

    def run(reshard: bool) -> int:
        from pdt.comm.meter import meter
        from pdt.zero import fully_shard

        model = nn.Sequential(*[nn.Linear(12, 11, bias=False), nn.Linear(11, 12, bias=False)])
        for layer in model:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model)
        for _ in range(3):  # the first records
            with meter() as records:
                model(torch.randn(3, 12)).sum().backward()
        return sum(r.wire_nbytes for r in records.records if r.op != "all_reduce")

    nbytes = 4 * 2 * 12 * 11
    assert nbytes % world_size == 0
    for reshard, times in ((True, 3), (False, 2)):
        expected = times * nbytes * (world_size - 1) // world_size
        assert pool(world_size).run(run, reshard) == [expected] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_holds_its_shard_and_two_units(pool: Any, world_size: int) -> None:
    """By the ledger: parameters never exceed the shards, one unit and one that is gathered ahead;
    after the step a rank holds 1/n of parameters, gradients and states."""

    width, layers = 64, 6

    def run() -> tuple[int, dict[str, int], int]:
        from pdt.measure.memory import Ledger
        from pdt.zero import fully_shard

        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(2, width)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        with Ledger(model=model, optimizer=optimizer) as ledger:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            after = ledger.snapshot("after")
        return max(live["parameters"] for _, live in ledger.timeline), after, ledger.peak_total

    unit = 4 * width * width
    shards = layers * unit // world_size
    for peak, after, total in pool(world_size).run(run):
        assert peak <= shards + 2 * unit
        assert after["parameters"] == after["gradients"] == shards
        assert shards * 2 <= after["optimizer states"] <= shards * 2 + 8 * layers
        # At the worst moment all states and parameters are there, the gradients of all units but
        # two; one unit is used, one gathered ahead; a unit's gradients are whole, another's are on
        # their way, and what arrives of it is (n-1)/n.
        arriving = unit * (world_size - 1) // world_size
        formula = 4 * shards - 2 * unit // world_size + 4 * unit + arriving
        assert 0.95 * formula <= total <= 1.05 * formula


def test_the_storage_is_freed_and_is_the_same_for_ever(pool: Any) -> None:
    def run() -> None:
        model = _shard(_make("mlp"))
        layer: Any = model[1][0]
        seen = []

        def look(*_: Any) -> None:
            seen.append(layer.weight.untyped_storage())

        layer.register_forward_hook(look)
        for _ in range(3):
            model(_tokens(0)).sum().backward()
            assert layer.weight.dim() == 1
            assert seen[-1].nbytes() == 0
        with torch.no_grad():
            model(_tokens(0))
        assert len({storage._cdata for storage in seen}) == 1
        assert seen[0].nbytes() == 0

    pool(2).run(run)
