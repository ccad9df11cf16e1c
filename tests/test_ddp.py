"""DDP equals one process and torch's DDP, on every rank, and leaves what it should in `.grad`."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

SEED, SAMPLES, STEPS = 7, 12, 4


class Cruel(nn.Module):
    """Tied, frozen, transposed, 0-dim, empty and buffered, all in one small model."""

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
        self.register_buffer("shift", torch.full((5,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x)) * self.scale + self.shift
        x = self.frozen(torch.tanh(self.tied(x)))
        return x @ self.transposed + self.empty.sum()


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 3)
    )


def _conv() -> nn.Module:
    class Picture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(5, 4, 1).to(memory_format=torch.channels_last)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x[:, :, None, None]).flatten(1)

    return Picture()


MODELS = {"mlp": _mlp, "cruel": Cruel, "channels_last": _conv}


def _make(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(SEED)
    return MODELS[name]().to(dtype)


def _samples(step: int) -> Tensor:
    return torch.randn(
        SAMPLES, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
    )


def _train(model: nn.Module, rank: int, world_size: int) -> list[Tensor]:
    """The parameters after STEPS steps of AdamW with weight decay."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(_samples(step)[rank::world_size]).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _close(got: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cap", [0.0, 25.0])
def test_equals_one_process(pool: Any, world_size: int, name: str, cap: float) -> None:
    def run() -> list[Tensor]:
        from pdt.ddp import DDP

        model = DDP(_make(name), bucket_cap_mb=cap, first_bucket_mb=cap)
        return _train(model, dist.get_rank(), dist.get_world_size())

    alone = _train(_make(name), 0, 1)
    for trained in pool(world_size).run(run):
        _close(trained, alone)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_equals_torchs_to_the_bit_where_sums_have_one_order(pool: Any, backend: str) -> None:
    """Two ranks: a + b is b + a, so the layout of the buckets does not matter."""

    def run() -> bool:
        from torch.nn.parallel import DistributedDataParallel

        from pdt.ddp import DDP

        rank = dist.get_rank()
        ours = _train(DDP(_make("mlp")), rank, 2)
        theirs = _train(
            DistributedDataParallel(_make("mlp"), gradient_as_bucket_view=True), rank, 2
        )
        return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    assert all(pool(2, backend=backend).run(run))


@pytest.mark.parametrize("world_size", [3, 4])
def test_gradients_equal_torchs_to_the_bit_once_the_layouts_are_the_same(
    pool: Any, world_size: int
) -> None:
    """After the first step both lay their buckets out in the order in which gradients come."""

    def run() -> bool:
        from torch.nn.parallel import DistributedDataParallel

        from pdt.ddp import DDP

        rank, n = dist.get_rank(), dist.get_world_size()
        models = DDP(_make("mlp")), DistributedDataParallel(_make("mlp"))
        equal = []
        for step in range(3):
            for model in models:
                model.zero_grad()
                model(_samples(step)[rank::n]).square().mean().backward()
            pairs = zip(*(m.module.parameters() for m in models), strict=True)
            equal.append(all(torch.equal(a.grad, b.grad) for a, b in pairs))
        return all(equal[1:])

    assert all(pool(world_size).run(run))


@pytest.mark.parametrize("cap", [0.001, 1.0])
def test_calls_and_bytes_equal_the_plan_and_torchs(pool: Any, cap: float) -> None:
    def run() -> tuple[list[tuple[str, int]], list[tuple[str, int]], list[int]]:
        from torch.nn.parallel import DistributedDataParallel

        from pdt.comm import meter
        from pdt.ddp import DDP

        def calls(model: nn.Module) -> list[tuple[str, int]]:
            for step in range(3):
                model.zero_grad()
                with meter() as m:
                    model(_samples(step)).square().mean().backward()
            return [(record.op, record.nbytes) for record in m.records]

        ours = DDP(_make("mlp"), bucket_cap_mb=cap, first_bucket_mb=cap)
        theirs = DistributedDataParallel(_make("mlp"), bucket_cap_mb=cap)  # the first one's, too
        return calls(ours), calls(theirs), [bucket.nbytes for bucket in ours.buckets]

    for ours, theirs, plan in pool(2).run(run):
        assert ours == [("all_reduce", nbytes) for nbytes in plan]
        assert ours == theirs


def test_buckets_are_sent_before_backward_ends_and_in_index_order(pool: Any) -> None:
    def run() -> tuple[int, list[int], list[int]]:
        from pdt.comm import meter
        from pdt.ddp import DDP

        class Marked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

            def forward(self, x: Tensor) -> Tensor:
                for layer in self.layers:
                    x = layer(x)
                return x

        torch.manual_seed(dist.get_rank())
        model = DDP(Marked(), bucket_cap_mb=1e-4, first_bucket_mb=1e-4)
        model(torch.randn(2, 8)).sum().backward()
        seen = []
        with meter() as m:
            x = torch.randn(2, 8, requires_grad=True)
            x.register_hook(lambda grad: seen.append(len(m.records)))
            model(x).sum().backward()
        return seen[0], [r.nbytes for r in m.records], [b.nbytes for b in model.buckets]

    for before_the_last_gradient, sent, plan in pool(2).run(run):
        assert sent == plan
        assert len(plan) == 4
        assert before_the_last_gradient >= 3  # all but the first layer's, or all


def test_ranks_send_in_one_order_though_gradients_come_in_another(pool: Any) -> None:
    """Rank 1 uses its two branches the other way round."""

    def run() -> list[Tensor]:
        from pdt.ddp import DDP

        class Branches(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 7)

            def forward(self, x: Tensor) -> Tensor:
                if dist.get_rank() == 1:
                    return self.b(x).sum() + self.a(x).sum()
                return self.a(x).sum() + self.b(x).sum()

        torch.manual_seed(0)
        model = DDP(Branches().double(), bucket_cap_mb=0, first_bucket_mb=0)
        for _ in range(3):
            model.zero_grad()
            model(torch.full((2, 3), 1.0 + dist.get_rank(), dtype=torch.float64)).backward()
        return [p.grad.clone() for p in model.parameters()]

    for grads in pool(2).run(run):
        _close(grads, [torch.full_like(g, 3.0 if g.dim() == 2 else 2.0) for g in grads])


def test_gradients_are_views_of_the_buckets(pool: Any) -> None:
    def run() -> tuple[bool, bool, int, int]:
        from pdt.ddp import DDP

        model = DDP(_make("cruel"))
        for _ in range(2):
            model.zero_grad()
            model(_samples(0)).square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        storages = {grad.untyped_storage().data_ptr(): grad.untyped_storage() for grad in grads}
        strides = all(p.grad.stride() == p.stride() for p in model.parameters() if p.requires_grad)
        held = sum(storage.nbytes() for storage in storages.values())
        return strides, len(storages) == len(model.buckets), held, sum(g.nbytes for g in grads)

    assert pool(2).run(run) == [(True, True, held := (25 + 5 + 15 + 1) * 8, held)] * 2


def test_replicas_start_as_rank_0(pool: Any) -> None:
    def run() -> list[Tensor]:
        from pdt.ddp import DDP

        torch.manual_seed(dist.get_rank())
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3).bfloat16())
        module.register_buffer("mask", torch.rand(5) > 0.5)
        return [t.clone() for t in DDP(module).state_dict().values()]

    first, *others = pool(3).run(run)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_buffers_follow_rank_0_in_training_and_not_in_evaluation(pool: Any) -> None:
    def run(flag: bool) -> tuple[int, float, float, float]:
        from pdt.comm import meter
        from pdt.ddp import DDP

        model = DDP(nn.BatchNorm1d(1), broadcast_buffers=flag)
        x = torch.arange(4.0)[:, None] + 10 * dist.get_rank()
        model(x)
        mean_1 = model.module.running_mean.item()
        model(x)
        mean_2 = model.module.running_mean.item()
        with meter() as m:
            model.eval()(x)
            with torch.no_grad():
                model.train()(x)
        return len(m), mean_1, mean_2, 1.5 + 10 * dist.get_rank()

    (calls, first, _, mean), (_, first_1, second_1, mean_1) = pool(2).run(run, True)
    assert calls == 0
    assert first == pytest.approx(0.1 * mean)
    assert first_1 == pytest.approx(0.1 * mean_1)
    assert second_1 == pytest.approx(0.9 * first + 0.1 * mean_1)  # rank 0's, then its own batch
    _, (_, first_1, second_1, mean_1) = pool(2).run(run, False)
    assert second_1 == pytest.approx(0.9 * first_1 + 0.1 * mean_1)


def test_a_subgroup_averages_among_itself(pool: Any) -> None:
    def run() -> list[float]:
        from pdt.ddp import DDP

        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        rank = dist.get_rank()
        layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(layer.weight, rank)
        model = DDP(layer, group=pairs[rank % 2])
        model(torch.full((1, 1), float(rank))).backward()
        twin = copy.deepcopy(model)  # with the same group
        twin(torch.full((1, 1), 10.0 * rank)).backward()
        for pair in pairs:
            if pair is pairs[rank % 2]:
                dist.destroy_process_group(pair)
        return [layer.weight.item(), layer.weight.grad.item(), twin.module.weight.grad.item()]

    assert pool(4).run(run) == [[0, 1, 10], [1, 2, 20], [0, 1, 10], [1, 2, 20]]


def test_a_copy_averages_by_itself_and_leaves_the_original_alone(pool: Any) -> None:
    def run() -> tuple[bool, float, float, float]:
        from pdt.ddp import DDP

        model = DDP(nn.Linear(1, 1, bias=False))
        x = torch.full((1, 1), 1.0 + dist.get_rank())
        model(x).backward()
        before = model.module.weight.grad.clone()
        twin = copy.deepcopy(model)
        twin(3 * x).backward()
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        loaded(5 * x).backward()
        same = torch.equal(model.module.weight.grad, before)
        grads = [m.module.weight.grad.item() for m in (model, twin, loaded)]
        return (same, *grads)

    assert pool(2).run(run) == [(True, 1.5, 4.5, 7.5)] * 2


def test_the_state_dict_is_torchs(pool: Any) -> None:
    def run() -> bool:
        from torch.nn.parallel import DistributedDataParallel

        from pdt.ddp import DDP

        ours, theirs = DDP(_make("cruel")), DistributedDataParallel(_make("cruel"))
        theirs.load_state_dict(ours.state_dict())
        return list(ours.state_dict()) == list(theirs.state_dict())

    assert all(pool(2).run(run))


def test_a_dropped_wrapper_lets_the_module_go(pool: Any) -> None:
    def run() -> tuple[str, int, float]:
        from pdt.comm import meter
        from pdt.ddp import DDP

        layer = nn.Linear(1, 1, bias=False)
        first = DDP(layer)
        try:
            DDP(layer)
        except ValueError as error:
            refused = str(error)
        del first
        with meter() as m:
            layer(torch.ones(1, 1)).backward()  # alone again
        layer.zero_grad()
        second = DDP(layer)
        second(torch.full((1, 1), 1.0 + dist.get_rank())).backward()
        return refused, len(m), layer.weight.grad.item()

    for refused, calls, grad in pool(2).run(run):
        assert "'weight'" in refused
        assert "averaged already, by a Reducer of pdt.ddp" in refused
        assert calls == 0
        assert grad == 1.5
