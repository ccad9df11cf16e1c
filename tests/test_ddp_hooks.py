"""What hooks send: bytes by formula, one result on all ranks, and nothing lost in the long run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdt.ddp import DDP
from pdt.ddp.compress import PowerSGD, TopK
from pdt.ddp.hooks import (
    GradBucket,
    all_reduce_hook,
    bf16_hook,
    fp16_hook,
    fp32_sum_hook,
    noop_hook,
)

SHAPES = [(12, 10), (7,), (8, 3, 5), (), (2, 2), (1, 9)]
NUMEL = sum(math.prod(shape) for shape in SHAPES)
MATRICES = [(12, 10), (8, 15)]  # as PowerSGD sees those that it compresses at rank 2
SMALL = NUMEL - sum(n * m for n, m in MATRICES)
MAKERS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: all_reduce_hook,
    "bf16": lambda: bf16_hook,
    "fp16": lambda: fp16_hook,
    "fp32_sum": lambda: fp32_sum_hook,
    "top_k": lambda: TopK(0.1),
    "power_sgd": lambda: PowerSGD(2),
}
KEEPING = ["top_k", "power_sgd"]


def send(hook: Any, grads: list[Tensor]) -> list[Tensor]:
    """What a hook leaves of one bucket with this rank's gradients; as DDP runs it."""
    from pdt.flat import flatten, unflatten

    flat = flatten(grads)
    bucket = GradBucket(0, flat, unflatten(flat, grads), is_last=True)
    for work in hook(bucket, None):
        work.wait()
    return bucket.views


def own_grads(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """This rank's share of a step's gradients, another one in each step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def summed(tensors: list[Tensor]) -> list[Tensor]:
    copies = [tensor.clone() for tensor in tensors]
    for each in copies:
        dist.all_reduce(each)
    return copies


def same_on_all(tensors: list[Tensor]) -> bool:
    """Whether rank 0 holds the same bits."""
    theirs = [tensor.clone() for tensor in tensors]
    for each in theirs:
        dist.broadcast(each, 0)
    return all(torch.equal(a, b) for a, b in zip(tensors, theirs, strict=True))


def sent_numel(name: str, n: int) -> list[tuple[str, int]]:
    """By formula: each call and its payload in bytes, of one bucket of fp32 gradients."""
    k, padded = math.ceil(0.1 * NUMEL), n * -(-NUMEL // n)
    ps, qs = (2 * sum(shape[i] for shape in MATRICES) for i in (0, 1))
    return {
        "all_reduce": [("all_reduce", 4 * NUMEL)],
        "bf16": [("all_reduce", 2 * NUMEL)],
        "fp16": [("all_reduce", 2 * NUMEL)],
        "fp32_sum": [("all_to_all", 2 * padded), ("all_gather", 2 * padded)],
        "top_k": [("all_gather", n * k * (4 + 4))],
        "power_sgd": [("all_reduce", 4 * (SMALL + ps)), ("all_reduce", 4 * qs)],
    }[name]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", MAKERS)
def test_the_wire_carries_what_the_formula_says(pool: Any, name: str, world_size: int) -> None:
    def run() -> tuple[list[tuple[str, int]], float]:
        from pdt.comm import meter

        with meter() as m:
            send(MAKERS[name](), own_grads(0, torch.float32))
        return [(r.op, r.nbytes) for r in m.records], m.total().wire_nbytes

    expected = sent_numel(name, world_size)
    hops = {"all_reduce": 2 * (world_size - 1)}
    on_wire = sum(hops.get(op, world_size - 1) * nbytes / world_size for op, nbytes in expected)
    for calls, wire_nbytes in pool(world_size).run(run):
        assert calls == expected
        assert wire_nbytes == pytest.approx(on_wire, rel=1e-12)


def test_noop_sends_nothing_and_leaves_the_gradients() -> None:
    bucket = GradBucket(0, torch.arange(3.0), [], is_last=True)
    assert list(noop_hook(bucket, None)) == []
    assert bucket.flat.tolist() == [0, 1, 2]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_rank_ends_with_the_same_bits(pool: Any, dtype: torch.dtype, world_size: int) -> None:
    def run() -> list[str]:
        differ = []
        for name, make in MAKERS.items():
            hook = make()
            steps = [send(hook, own_grads(step, dtype)) for step in range(3)]
            if not all(same_on_all(views) for views in steps):
                differ.append(name)
        return differ

    assert pool(world_size).run(run) == [[]] * world_size


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize(
    ("name", "rtol"), [("all_reduce", 1e-6), ("bf16", 0.01), ("fp16", 0.0012), ("fp32_sum", 0.01)]
)
def test_the_sum_is_right_within_the_precision(
    pool: Any, name: str, rtol: float, backend: str
) -> None:
    def run() -> bool:
        grads = [grad.abs() + 0.1 for grad in own_grads(0, torch.float32)]  # nothing cancels
        pairs = zip(send(MAKERS[name](), grads), summed(grads), strict=True)
        return all(torch.allclose(got, wanted, rtol=rtol, atol=0) for got, wanted in pairs)

    assert all(pool(2, backend=backend).run(run))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_an_fp32_sum_is_rounded_once(pool: Any, world_size: int) -> None:
    def run() -> bool:
        grads = own_grads(0, torch.float32)
        once = [t.bfloat16().float() for t in summed([g.bfloat16().double() for g in grads])]
        pairs = zip(send(fp32_sum_hook, grads), once, strict=True)
        return all(torch.equal(got, wanted) for got, wanted in pairs)

    assert all(pool(world_size).run(run))


def test_bf16_sums_lose_what_fp32_sums_keep(pool: Any) -> None:
    """256 + 1 + 1 + 1 is 259, in bf16 260 at best; hop by hop it is 256 where 256 comes first."""

    def run() -> tuple[float, set[float]]:
        grads = [torch.full((1024,), 256.0 if dist.get_rank() == 0 else 1.0)]
        (bf16,), (fp32_sum,) = send(bf16_hook, grads), send(fp32_sum_hook, grads)
        return bf16.min().item(), set(fp32_sum.tolist())

    assert pool(4).run(run) == [(256.0, {260.0})] * 4


class Scalar(nn.Module):
    """Its gradient is the mean of its inputs, to the bit."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.to(self.weight.dtype)).sum()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_fp16_does_not_overflow_where_the_mean_does_not(pool: Any, world_size: int) -> None:
    def run() -> list[list[float]]:
        means = []
        for hook, dtype in ((None, torch.float16), (fp16_hook, torch.float32)):
            model = DDP(Scalar(dtype), comm_hook=hook)
            model(torch.full((3,), 6e4)).backward()
            means.append(model.module.weight.grad.tolist())
        return means

    for means in pool(world_size).run(run):
        for mean in means:
            assert mean == pytest.approx([6e4] * 3, rel=2e-3)


def mlp(width: int = 24) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))


def batch(step: int, rank: int | None = None) -> Tensor:
    seed = 1000 * step + (dist.get_rank() if rank is None else rank)
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = batch(step)
    return (model(x) - x.roll(1, dims=1)).square().mean()


def train(model: nn.Module, steps: range, lr: float = 0.2) -> list[float]:
    """Plain SGD; the loss of each step on this rank."""
    losses = []
    for step in steps:
        model.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= lr * param.grad
    return losses


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_gradients_equal_those_of_torchs_hook(pool: Any, name: str) -> None:
    def run() -> bool:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.nn.parallel import DistributedDataParallel

        compress = getattr(default_hooks, f"{name}_compress_hook")
        theirs = DistributedDataParallel(mlp())
        # Under its own name torch lets the bf16 hook run with NCCL alone.
        theirs.register_comm_hook(None, lambda state, bucket: compress(state, bucket))
        ours = DDP(mlp(), comm_hook=MAKERS[name]())
        train(ours, range(5))
        train(theirs, range(5))
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        return all(torch.equal(a.grad, b.grad) for a, b in pairs)

    assert all(pool(2).run(run))  # two ranks: sums of one order, halves exact


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_power_sgd_sends_the_bytes_of_torchs_at_the_same_rank(pool: Any, rank: int) -> None:
    """Ours in two calls a bucket, torch's in three; the state of both is warm."""

    def run() -> tuple[int, int, int, int]:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
        from torch.nn.parallel import DistributedDataParallel

        from pdt.comm import meter

        theirs = DistributedDataParallel(mlp())
        state = powersgd.PowerSGDState(None, rank, start_powerSGD_iter=2)
        theirs.register_comm_hook(state, powersgd.powerSGD_hook)
        totals = []
        for model in (DDP(mlp(), comm_hook=PowerSGD(rank)), theirs):
            train(model, range(4))
            with meter() as m:
                loss_of(model, 4).backward()
            totals.append(m.total())
        ours, torchs = totals
        return ours.nbytes, torchs.nbytes, ours.calls, torchs.calls

    for ours, torchs, calls, torchs_calls in pool(2).run(run):
        assert ours == torchs
        assert (calls, torchs_calls) == ((2, 3) if rank < 4 else (1, 3))


def test_power_sgd_is_exact_for_matrices_of_its_rank(pool: Any) -> None:
    def run() -> bool:
        hook, right = PowerSGD(2), []
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            left = torch.randn(20, 2, generator=torch.Generator().manual_seed(step)).double()
            grads = [left @ torch.randn(2, 30, generator=generator).double()]
            (got,), (wanted,) = send(hook, grads), summed(grads)
            right.append(torch.allclose(got, wanted, rtol=0, atol=1e-11))
        return all(right)

    assert all(pool(3).run(run))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", KEEPING)
def test_what_was_applied_adds_up_to_the_true_sum(pool: Any, name: str, world_size: int) -> None:
    """Four steps, then zeros until all that was kept has gone; without feedback it never comes."""

    def run() -> list[float]:
        worst = []
        for keeps in (True, False):
            hook = MAKERS[name]()
            hook.error_feedback = keeps
            applied = [torch.zeros(shape).double() for shape in SHAPES]
            true = [torch.zeros(shape).double() for shape in SHAPES]
            for step in range(24):
                grads = [grad * (step < 4) for grad in own_grads(step)]
                for total, part in zip(true, summed(grads), strict=True):
                    total += part
                for total, part in zip(applied, send(hook, grads), strict=True):
                    total += part
            pairs = zip(applied, true, strict=True)
            worst.append(max((a - b).abs().max().item() for a, b in pairs))
        return worst

    for kept, dropped in pool(world_size).run(run):
        assert kept < 1e-9
        assert dropped > 0.1


def test_what_is_kept_of_16_bit_gradients_does_not_stick(pool: Any) -> None:
    """In bf16 the rest of the small gradient would stay at 256 and never be the largest."""

    def run() -> float:
        hook, total = TopK(0.5), 0.0
        for _ in range(310):
            total += send(hook, [torch.tensor([300.0, 1.0]).bfloat16()])[0][1].item()
        return total

    assert pool(1).run(run)[0] > 290


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_trains(pool: Any, name: str) -> None:
    def run() -> tuple[list[float], bool]:
        model = DDP(mlp(), comm_hook=MAKERS[name](), first_bucket_mb=5e-4, bucket_cap_mb=5e-4)
        plans = []
        losses = train(model, range(1))
        for step in range(1, 120):
            plans.append(model.buckets)
            losses += train(model, range(step, step + 1), lr=0.5)
        layout_stays = all(plan == plans[0] for plan in plans) and len(plans[0]) > 1
        return losses, layout_stays and same_on_all([p.detach() for p in model.parameters()])

    for losses, is_right in pool(2).run(run):
        assert is_right
        assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize("name", KEEPING)
def test_a_copy_keeps_what_was_kept(pool: Any, name: str) -> None:
    def run() -> tuple[bool, bool]:
        original = DDP(mlp(), comm_hook=MAKERS[name]())
        train(original, range(4))
        twin = copy.deepcopy(original)
        forgetful = DDP(copy.deepcopy(original.module), comm_hook=MAKERS[name]())
        for model in (original, twin, forgetful):
            train(model, range(4, 8))
        ends = [list(model.parameters()) for model in (original, twin, forgetful)]
        equal = [all(map(torch.equal, ends[0], other)) for other in ends[1:]]
        return equal[0], equal[1]

    assert pool(2).run(run) == [(True, False)] * 2


@pytest.mark.parametrize("name", MAKERS)
def test_shadow_steps_do_no_harm(pool: Any, name: str) -> None:
    """Ranks of 1, 3 and 5 batches: all end with one finite model, about that of an all-reduce."""

    def run() -> tuple[bool, float]:
        def end(hook: Any) -> list[Tensor]:
            model = DDP(mlp(), comm_hook=hook)
            with model.join():
                train(model, range(1 + 2 * dist.get_rank()))
            return [p.detach() for p in model.parameters()]

        ours, exact, start = end(MAKERS[name]()), end(None), list(mlp().parameters())
        off = sum((a - b).square().sum() for a, b in zip(ours, exact, strict=True))
        moved = sum((a - b).square().sum() for a, b in zip(start, exact, strict=True))
        return same_on_all(ours), (off / moved).sqrt().item()

    for same, off in pool(3).run(run):
        assert same
        assert off < (0.9 if name in KEEPING else 0.03)


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_reaches_all_ranks_and_is_not_kept(pool: Any, name: str, bad: float) -> None:
    def run() -> list[bool]:
        hook, finite = MAKERS[name](), []
        for step in range(6):
            grads = own_grads(step)
            if step == 2 and dist.get_rank() == 1:
                grads[0][:8, 3] = bad
            views = send(hook, grads)
            finite.append(all(bool(view.isfinite().all()) for view in views))
        return [*finite, any(bool(view.ne(0).any()) for view in views)]

    assert pool(3).run(run) == [[True, True, False, True, True, True, True]] * 3


def test_power_sgd_wakes_up_from_steps_without_gradients(pool: Any) -> None:
    def run() -> bool:
        hook = PowerSGD(1)
        zeros = [torch.zeros(20, 30).double()]
        for _ in range(3):
            send(hook, zeros)
        once = [torch.outer(torch.arange(20.0), torch.arange(30.0)).double()]
        applied = sum(send(hook, once if step == 0 else zeros)[0] for step in range(6))
        return torch.allclose(applied, summed(once)[0])

    assert all(pool(2).run(run))


@pytest.mark.parametrize("name", KEEPING)
def test_new_buckets_begin_anew(pool: Any, name: str) -> None:
    def run() -> bool:
        model = DDP(mlp(), comm_hook=MAKERS[name]())
        train(model, range(3))
        model.module[0].weight.requires_grad_(False)
        model.module[0].weight.grad = torch.zeros_like(model.module[0].weight)
        train(model, range(3, 6))
        return same_on_all([p.detach() for p in model.parameters()])

    assert all(pool(2).run(run))


@pytest.mark.parametrize("name", MAKERS)
def test_complex_gradients_keep_their_imaginary_part(pool: Any, name: str) -> None:
    def run() -> bool:
        hook = TopK(1.0) if name == "top_k" else MAKERS[name]()
        grads = [torch.full((12, 10), 1 + 2j * (1 + dist.get_rank()), dtype=torch.complex64)]
        (got,), (wanted,) = send(hook, grads), summed(grads)
        return torch.allclose(got, wanted, rtol=0.01)

    assert all(pool(2).run(run))


def test_channels_last_and_transposed_gradients_come_back_in_place(pool: Any) -> None:
    """Compressed without loss (all of them, or at full rank), they equal an all-reduce."""

    def run() -> list[bool]:
        def grads() -> list[Tensor]:
            generator = torch.Generator().manual_seed(dist.get_rank())
            picture = torch.randn(8, 3, 4, 4, generator=generator)
            matrix = torch.randn(9, 5, generator=generator)
            return [picture.to(memory_format=torch.channels_last), matrix.t()]

        right = []
        for hook in (TopK(1.0), PowerSGD(8, min_compression=0.0)):
            pairs = zip(send(hook, grads()), summed(grads()), strict=True)
            right.append(all(torch.allclose(a, b, atol=1e-5) for a, b in pairs))
        return right

    assert pool(2).run(run) == [[True, True]] * 2


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, math.nan])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=f"fraction must be .* got {fraction}"):
        TopK(fraction)


def test_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="rank must be 1 or more, got 0"):
        PowerSGD(0)
