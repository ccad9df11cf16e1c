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


# To the bit


def _bits(stage: int, cap: float, rank: int, world_size: int, **settings: Any) -> list[Tensor]:
    """A few steps in fp32 by the stage; stage 0: torch's DDP with ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from pdt.zero import Zero1, Zero2

    model = _make("mlp", torch.float32)
    optimizer: torch.optim.Optimizer
    if stage == 0:
        wrapped = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)
    else:
        wrapped = model
        make = (Zero1, Zero2)[stage - 1]
        optimizer = make(model.parameters(), torch.optim.AdamW, bucket_cap_mb=cap, **settings)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(_samples(step)[rank::world_size].float()).square().mean().backward()
        optimizer.step()
        history += [p.detach().clone() for p in model.parameters()]
    return history


def _same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_buckets_and_stages_do_not_change_a_bit(pool: Any, world_size: int) -> None:
    def run() -> list[list[Tensor]]:
        rank = dist.get_rank()
        caps = (0.0, 0.0004, 25.0)
        return [_bits(stage, cap, rank, world_size, lr=0.05) for stage in (1, 2) for cap in caps]

    first, *others = pool(world_size).run(run)
    assert all(_same(found, first[0]) for found in first)
    assert all(_same(found, first[0]) for rank in others for found in rank)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_two_ranks_equal_torch_s_own_and_one_process_to_the_bit(
    pool: Any, weight_decay: float
) -> None:
    """A sum of two has one order, and a half of it is exact."""
    settings = {"lr": 0.05, "weight_decay": weight_decay}

    def run() -> list[list[Tensor]]:
        return [_bits(stage, 25.0, dist.get_rank(), 2, **settings) for stage in (0, 1, 2)]

    model = _make("mlp", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    alone = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (model(_samples(step)[rank::2].float()).square().mean() / 2).backward()
        optimizer.step()
        alone += [p.detach().clone() for p in model.parameters()]
    for theirs, *ours in pool(2).run(run):
        assert _same(theirs, alone)
        assert all(_same(found, alone) for found in ours)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("schedule", ["one cycle", "cosine", "lambda"])
def test_schedules_of_the_learning_rate_work_by_group(pool: Any, stage: int, schedule: str) -> None:
    from torch.optim import lr_scheduler

    def train(make: Any, rank: int, world_size: int) -> list[Any]:
        model = _make("mlp")
        groups = [
            {"params": list(model[0].parameters()), "lr": 0.02},
            {"params": list(model[2:].parameters()), "weight_decay": 0.2},
        ]
        optimizer = make(groups, torch.optim.AdamW, lr=0.05)
        scheduler: Any = {
            "one cycle": lambda: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=6),
            "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 5),
            "lambda": lambda: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        }[schedule]()
        history = []
        for step in range(STEPS):
            optimizer.zero_grad()
            model(_samples(step)[rank::world_size]).square().mean().backward()
            optimizer.step()
            scheduler.step()
            history += [p.detach().clone() for p in model.parameters()]
            history += [torch.tensor(scheduler.get_last_lr())]
        return history

    def run() -> list[Any]:
        from pdt.zero import Zero1, Zero2

        return train((Zero1, Zero2)[stage - 1], dist.get_rank(), dist.get_world_size())

    expected = train(lambda params, cls, **kw: cls(params, **kw), 0, 1)
    for found in pool(2).run(run):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


# Memory


def _wide(units: int = 8) -> nn.Module:
    """Units of 64 KiB."""
    torch.manual_seed(SEED)
    return nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(units)])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_one_part_in_n_to_the_byte(
    pool: Any, world_size: int, stage: int, dtype: torch.dtype
) -> None:
    def run() -> tuple[int, int, int, int]:
        from pdt.measure import Ledger
        from pdt.zero import Zero1, Zero2

        model = _make("mlp", dtype)
        make = (Zero1, Zero2)[stage - 1]
        master = None if dtype == torch.float32 else torch.float32
        optimizer = make(model.parameters(), torch.optim.AdamW, master_dtype=master)
        with Ledger(model, optimizer) as ledger:
            model(torch.ones(2, 5, dtype=dtype)).square().mean().backward()
            optimizer.step()
        (bucket,) = optimizer.buckets
        live = ledger.live()
        own = sum(piece.numel for piece in bucket.pieces)
        masters = 0 if master is None else 4 * bucket.layout.shard_numel
        runs = len(optimizer.updates[0].runs)
        assert live["optimizer states"] == 2 * 4 * own + 4 * runs + masters
        assert live["parameters"] == bucket.flat.nbytes  # padding and all
        if stage == 2:
            assert live["gradients"] == bucket.layout.shard_numel * dtype.itemsize
        return own, bucket.layout.shard_numel, runs, sum(bucket.layout.numels)

    held = pool(world_size).run(run)
    numel = held[0][-1]
    assert sum(own for own, *_ in held) == numel
    assert all(own <= shard == -(-numel // world_size) for own, shard, *_ in held)
    assert all(runs <= 1 for *_, runs, _ in held)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("per_bucket", [1, 2])
def test_zero2_never_holds_more_gradients_than_its_shard_and_three_buckets(
    pool: Any, world_size: int, per_bucket: int
) -> None:
    def run() -> tuple[int, list[int]]:
        from pdt.measure import Ledger
        from pdt.zero import Zero2, bucket, filling

        model = _wide()
        cap = per_bucket * model[0].weight.nbytes / 2**20
        optimizer = Zero2(model.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=cap)
        lent, most, after = [0], [0], []

        def look(change: int = 0) -> None:
            lent[0] += change
            grads = [p.grad.nbytes for p in model.parameters() if p.grad is not None]
            means = [b.shard_grad.nbytes for b in optimizer.buckets if b.shard_grad is not None]
            most[0] = max(most[0], lent[0] + sum(grads) + sum(means))

        with pytest.MonkeyPatch.context() as patch:
            new_flat, wait = bucket.ShardedBucket.new_flat, bucket.StartedReduce.wait
            move = filling.Filling.move

            def counted_new(self: Any) -> Tensor:
                look(self.flat.nbytes)
                return new_flat(self)

            def counted_wait(self: Any) -> Any:
                done = wait(self)
                look(-done.flat.nbytes)
                return done

            patch.setattr(bucket.ShardedBucket, "new_flat", counted_new)
            patch.setattr(bucket.StartedReduce, "wait", counted_wait)
            patch.setattr(filling.Filling, "move", lambda self: (look(), move(self))[1])
            for _ in range(2):  # in the first the order is learned
                optimizer.zero_grad()
                with Ledger(model, optimizer) as ledger:
                    model(torch.ones(1, 128)).square().mean().backward()
                    after.append(ledger.snapshot("after backward")["gradients"])
                    optimizer.step()
        return most[0], after

    unit, units = 128 * 128 * 4, 8
    shard = units * unit // world_size
    for most, after in pool(world_size).run(run):
        assert after == [shard, shard]
        assert unit < most <= shard + 3 * per_bucket * unit


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_kept_buffers_change_no_bit_and_are_three_buckets_and_two_inboxes_at_most(
    pool: Any, world_size: int, stage: int
) -> None:
    def run() -> tuple[bool, int, int]:
        from pdt.zero import Zero1, Zero2

        make, histories = (Zero1, Zero2)[stage - 1], []
        for keep in (False, True):
            model = _make("mlp")
            optimizer = make(
                model.parameters(), torch.optim.AdamW, bucket_cap_mb=0, keep_buffers=keep
            )
            histories.append(_train(model, optimizer, dist.get_rank(), dist.get_world_size()))
        kept = sum(buffer.nbytes for buffer in optimizer._scratch._free)
        largest = max(bucket.flat.nbytes for bucket in optimizer.buckets)
        equal = [torch.equal(a, b) for a, b in zip(*histories, strict=True)]
        return all(equal), kept, largest

    for equal, kept, largest in pool(world_size).run(run):
        assert equal
        assert 0 < kept <= 5 * largest


# Traffic


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_step_sends_two_shares_of_the_parameters_and_a_byte_for_each(
    pool: Any, world_size: int
) -> None:
    def run() -> None:
        from pdt.comm import meter
        from pdt.zero import Zero1, Zero2

        n = dist.get_world_size()
        share = (n - 1) / n
        model = _make("mlp", torch.float32)
        count = len(list(model.parameters()))
        one = Zero1(model.parameters(), torch.optim.AdamW, bucket_cap_mb=0)
        padded = sum(bucket.flat.nbytes for bucket in one.buckets)
        for _ in range(2):
            with meter() as backward:
                model(torch.ones(2, 5)).square().mean().backward()
            with meter() as step:
                one.step()
            assert len(backward) == 0
            assert step.total().wire_nbytes == pytest.approx(2 * share * (padded + count))
        del one
        model.zero_grad()
        two = Zero2(model.parameters(), torch.optim.AdamW, bucket_cap_mb=0)
        for first in (True, False):
            two.zero_grad()
            for learns in (first, False):
                with meter() as backward:
                    model(torch.ones(2, 5)).square().mean().backward()
                order = 8 * len(two.buckets) if learns else 0
                assert backward.total("broadcast").nbytes == order
                sent = backward.total().wire_nbytes - backward.total("broadcast").wire_nbytes
                assert sent == pytest.approx(share * padded)
            with two.no_sync(), meter() as silent:
                model(torch.ones(2, 5)).square().mean().backward()
            assert len(silent) == 0
            model(torch.ones(2, 5)).square().mean().backward()
            with meter() as step:
                two.step()
            assert step.total().wire_nbytes == pytest.approx(share * (padded + 2 * 2 * count))

    pool(world_size).run(run)


@pytest.mark.parametrize("frozen", [None, 2])
def test_zero2_sends_while_backward_runs_also_past_frozen_layers(
    pool: Any, frozen: int | None
) -> None:
    def run() -> list[int]:
        from pdt.comm import meter
        from pdt.zero import Zero2

        model = _make("mlp", torch.float32)
        optimizer = Zero2(model.parameters(), torch.optim.SGD, bucket_cap_mb=0)
        if frozen is not None:
            model[frozen].requires_grad_(False)
        counts: list[int] = []
        for _ in range(2):
            optimizer.zero_grad()
            with meter() as m:
                hidden = model[0](torch.ones(2, 5))
                hidden.register_hook(lambda _grad, m=m: counts.append(m.total("send").calls))
                model[1:](hidden).square().mean().backward()
        return counts

    for counts in pool(2).run(run):
        assert counts[1] >= 2  # of the last layer, before backward has reached the first


def test_gradients_that_one_rank_lacks_are_sent_as_zeros(pool: Any) -> None:
    def run() -> list[list[float]]:
        from pdt.zero import Zero2

        params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
        optimizer = Zero2(params, torch.optim.SGD, lr=1.0, bucket_cap_mb=0)
        rank = dist.get_rank()
        for step in range(3):
            optimizer.zero_grad()
            used = params[step % 3 :] if rank == 0 else params[: step + 1]
            sum(p.sum() for p in used).backward()
            optimizer.step()
        return [p.tolist() for p in params]

    expected = [[1.0 - 0.5 * k] * 3 for k in (4, 4, 4)]
    assert pool(2).run(run) == [expected] * 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_large_parameters_are_one_however_their_states_are_parted(
    pool: Any, world_size: int
) -> None:
    """The optimizer works on stretches that fit into a cache: nobody sees it from outside."""
    shapes = [(700, 1001), (3,), (400, 800)]

    def train(make: Any) -> tuple[list[Tensor], dict[str, Any]]:
        generator = torch.Generator().manual_seed(SEED)
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        optimizer = make(params)
        for step in range(4):
            if step == 2:
                state = optimizer.state_dict()
                del optimizer
                optimizer = make(params)
                optimizer.load_state_dict(state)
            for param in params[: 2 + step % 2]:
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in params], optimizer.state_dict()["state"]

    def run() -> bool:
        from pdt.zero import Zero1

        found, state = train(lambda params: Zero1(params, torch.optim.AdamW, lr=0.1))
        wanted, wanted_state = train(lambda params: torch.optim.AdamW(params, lr=0.1))
        return all(
            torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(found, wanted, strict=True)
        ) and all(
            torch.allclose(state[i][key], value, rtol=0, atol=1e-6)
            for i, each in wanted_state.items()
            for key, value in each.items()
        )

    assert all(pool(world_size).run(run))
