"""Shared parameters: one copy for all ranks, the bits of replicated training, and nothing hangs."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import re
import time
from functools import reduce
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pdt import RankError, Ranks
from pdt.ddp import shared_memory
from pdt.ddp.shared import SharedOptimizer, SharedParameters
from pdt.ddp.shared_memory import ALIGN_NUMEL, slice_cuts
from pdt.measure.memory import Ledger

SIZES = [1, 2, 3, 4]
LAYERS = 8
OPTIMIZERS = {
    "sgd": lambda params, make: make(params, torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": lambda params, make: make(params, torch.optim.AdamW, lr=0.01),
    "fused": lambda params, make: make(params, torch.optim.AdamW, lr=0.01, fused=True),
}


def plain(params, optimizer_class, **defaults):
    return optimizer_class(params, **defaults)


class Cruel(nn.Module):
    """Tied, frozen, unused, used by rank 0 alone, 0-dim, empty and transposed parameters."""

    def __init__(self, width=13):
        super().__init__()
        self.first = nn.Linear(width, 2 * width + 1)
        self.tied = nn.Linear(width, 2 * width + 1, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Parameter(torch.ones(width))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.transposed = nn.Parameter(torch.randn(2 * width + 1, width).t())
        self.norm = nn.BatchNorm1d(2 * width + 1)

    def forward(self, x, sometimes=True):
        x = self.frozen(x)
        y = torch.tanh(self.first(x)) + self.tied(x)
        y = y * self.scale + self.empty.sum()
        y = (y @ self.transposed.t()).tanh()
        return y + self.sometimes if sometimes else y


def cruel(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return Cruel().to(dtype)


def batch(step, rank, dtype=torch.float64, rows=5):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 13, generator=generator, dtype=torch.float64).to(dtype)


def values(module):
    return [param.detach().clone() for param in module.parameters()]


def train(wrap, make, optimizer, steps=4, dtype=torch.float32, **used):
    """Losses and parameters of a rank's training."""
    rank = dist.get_rank()
    module = cruel(seed=rank, dtype=dtype)  # all must go on from rank 0's values
    model = wrap(module)
    stepper = OPTIMIZERS[optimizer](model.parameters(), make)
    losses = []
    for step in range(steps):
        stepper.zero_grad()
        loss = model(batch(step, rank, dtype), **used).square().mean()
        loss.backward()
        stepper.step()
        losses.append(loss.detach())
    return losses, values(module)


def torch_ddp(module):
    return DistributedDataParallel(module, find_unused_parameters=True)


def same_bits(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("n", SIZES)
def test_losses_and_parameters_have_the_bits_of_torchs_ddp_that_adds_in_the_same_order(
    pool, n, optimizer
):
    ranks = pool(n, backend="shm")
    ours = ranks.run(train, SharedParameters, SharedOptimizer, optimizer)
    theirs = ranks.run(train, torch_ddp, plain, optimizer)
    for (losses, params), (expected_losses, expected) in zip(ours, theirs, strict=True):
        assert same_bits(losses, expected_losses)
        assert same_bits(params, expected)
        assert same_bits(params, ours[0][1])


def single(n, steps=4):
    """One process, all ranks' batches."""
    module = cruel()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        losses = [module(batch(step, r), r == 0).square().mean() for r in range(n)]
        (sum(losses) / n).backward()
        optimizer.step()
    return values(module)


def several(steps=4):
    """The same on this rank, shared; only rank 0 uses the parameter `sometimes`."""
    rank = dist.get_rank()
    module = cruel(seed=rank)
    model = SharedParameters(module)
    optimizer = SharedOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1
    )
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, rank), rank == 0).square().mean().backward()
        optimizer.step()
    grads = {name: param.grad for name, param in module.named_parameters()}
    assert module.tied.weight is module.first.weight
    return values(module), [name for name, grad in grads.items() if grad is None]


@pytest.mark.parametrize("n", SIZES)
def test_training_equals_one_process_on_all_batches(pool, n):
    expected = single(n)
    for params, without_grad in pool(n).run(several):
        torch.testing.assert_close(params, expected, rtol=1e-11, atol=1e-12)
        unused = ["frozen.weight", "frozen.bias", "unused.weight", "unused.bias"]
        assert without_grad == [*unused, "norm.weight", "norm.bias"]  # left alone by weight decay


def rounded_once(dtype):
    """What `.grad` and the parameters are after a step, and each rank's own gradients."""
    rank, n = dist.get_rank(), dist.get_world_size()
    module = nn.Linear(40, 33, bias=False).to(dtype)
    model = SharedParameters(module)
    optimizer = SharedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    before = module.weight.detach().clone()
    torch.manual_seed(rank)
    x = torch.randn(3, 40).to(dtype) * 100
    private = copy.deepcopy(module)
    private(x).sum().backward()
    model(x).sum().backward()
    own = private.weight.grad.float() * (1 / n)
    parts = [torch.empty_like(own) for _ in range(n)]
    dist.all_gather(parts, own)
    mean = reduce(torch.add, parts)
    assert torch.equal(module.weight.grad, mean)
    optimizer.step()
    assert torch.equal(module.weight.detach(), before - mean.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 3])
def test_low_precision_is_summed_in_float32_and_rounded_once(pool, n, dtype):
    pool(n).run(rounded_once, dtype)


def overflow():
    weight = nn.ParameterList([nn.Parameter(torch.ones(4, dtype=torch.float16))])
    model = SharedParameters(weight)
    (weight[0] * 6e4).sum().backward()
    return model.module[0].grad


def test_a_sum_of_large_fp16_gradients_does_not_overflow(pool):
    for grad in pool(2).run(overflow):
        torch.testing.assert_close(grad, torch.full((4,), 6e4), rtol=1e-3, atol=0)


@given(
    st.lists(st.integers(0, 300) | st.integers(10_000, 20_000), max_size=9),
    st.integers(1, 9),
)
def test_slices_cover_all_are_equal_and_cut_where_vectors_end(numels, n):
    cuts = slice_cuts(numels, n)
    starts = [sum(numels[:i]) for i in range(len(numels) + 1)]
    assert cuts[0] == 0
    assert cuts[-1] == sum(numels)
    assert cuts == sorted(cuts)
    for rank, cut in enumerate(cuts[:-1]):
        assert 0 <= sum(numels) * rank // n - cut < ALIGN_NUMEL
        start = max((s for s in starts if s <= cut), default=0)
        assert (cut - start) % ALIGN_NUMEL == 0


def shared_kb():
    """Proportional and resident kB of the memory mapped by this process that has no name."""
    kb, inside = {"Pss": 0, "Rss": 0}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            inside = "memfd:pdt" in line
        elif inside and (name := line.split(":")[0]) in kb:
            kb[name] += int(line.split()[1])
    return kb


def in_step_kb():
    """kB that this process maps after a step; the ranks look at the same time."""
    module = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 500))
    model = SharedParameters(module)
    optimizer = SharedOptimizer(model.parameters())
    model(torch.randn(2, 1000)).sum().backward()
    optimizer.step()
    dist.barrier()
    kb = shared_kb()
    dist.barrier()
    return kb, sum(p.nbytes for p in model.parameters()) / 1024


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what is shared")
@pytest.mark.parametrize("n", [2, 4])
def test_n_ranks_hold_one_copy_of_parameters_and_sums(pool, n):
    seen = pool(n).run(in_step_kb)
    one_copy = 2 * seen[0][1]
    assert one_copy <= sum(kb["Pss"] for kb, _ in seen) < 1.05 * one_copy
    assert all(kb["Rss"] >= one_copy for kb, _ in seen)  # all of it, on every rank


def held_nbytes():
    """The ledger's bytes after a step, the most of passing ones in backward, those of the model."""
    module = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(LAYERS)])
    model = SharedParameters(module)
    optimizer = SharedOptimizer(model.parameters())
    x = torch.randn(1, 64)
    with Ledger(module, optimizer) as ledger:
        model(x).sum().backward()
        passing = max(live["other"] for _, live in ledger.timeline)
        optimizer.step()
    sums = {p.shared_slot.view.untyped_storage().data_ptr() for p in module.parameters()}
    assert {p.grad.untyped_storage().data_ptr() for p in module.parameters()} == sums
    return ledger.live(), passing, sum(p.nbytes for p in module.parameters())


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_rank_holds_the_gradient_of_one_layer_and_its_part_of_the_states(pool, n):
    for live, passing, nbytes in pool(n).run(held_nbytes):
        assert live["parameters"] == live["gradients"] == nbytes  # shared, and seen by every rank
        layer = nbytes // LAYERS
        assert layer <= passing <= 2 * layer + 8 * 64 * 4  # its own: one layer's, one under way
        assert live["optimizer states"] == 2 * nbytes // n + 4 * LAYERS // n  # and steps


def one_memory():
    model = SharedParameters(nn.Linear(3, 3))
    if dist.get_rank() == 1:
        model.module.weight.data.fill_(42)
    dist.barrier()
    return bool((model.module.weight == 42).all())


def test_what_one_rank_writes_all_ranks_see(pool):
    assert pool(3).run(one_memory) == [True] * 3


def accumulated(how):
    """Gradients of two micro-batches, and the sum of the single ones."""
    rank = dist.get_rank()
    module = cruel()
    model = SharedParameters(module)
    if how == "two backwards":
        model(batch(0, rank)).square().sum().backward()
        model(batch(1, rank)).square().sum().backward()
    elif how == "no_sync":
        with model.no_sync():
            model(batch(0, rank)).square().sum().backward()
        model(batch(1, rank)).square().sum().backward()
    elif how == "two forwards first":
        losses = [model(batch(step, rank)).square().sum() for step in (0, 1)]
        for loss in losses:
            loss.backward()
    else:
        loss = sum(model(batch(step, rank)).square().sum() for step in (0, 1))
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("how", ["two backwards", "no_sync", "two forwards first", "retain_graph"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_accumulate_until_zero_grad(pool, n, how):
    module = cruel()
    sum(module(batch(k, r)).square().sum() / n for k in (0, 1) for r in range(n)).backward()
    expected = [p.grad for p in module.parameters() if p.grad is not None]
    for seen in pool(n).run(accumulated, how):
        torch.testing.assert_close(seen, expected, rtol=1e-11, atol=1e-12)


def used_before_the_last():
    model = SharedParameters(nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)]))
    x = torch.full((1, 1), dist.get_rank() + 1.0)
    with model.no_sync():
        model.module[0](x).sum().backward()
    model.module[1](x).sum().backward()
    return [layer.weight.grad.item() for layer in model.module]


def test_what_only_an_unsynchronised_backward_used_is_reduced_at_the_next(pool):
    assert pool(2).run(used_before_the_last) == [[1.5, 1.5]] * 2


def zeroed(to_none, inside):
    """A backward, zero_grad, another one: the gradients of the second alone."""
    rank = dist.get_rank()
    module = nn.Linear(13, 2).double()
    model = SharedParameters(module)
    optimizer = SharedOptimizer(model.parameters())
    model(batch(0, rank)).sum().backward()
    if inside:
        with model.no_sync():
            model(batch(1, rank)).sum().backward()
    if rank == 1:
        time.sleep(0.2)  # the others must not begin before this rank has read and zeroed
    before = module.weight.grad.clone()
    (optimizer if to_none else model).zero_grad(set_to_none=to_none)
    model(batch(2, rank)).sum().backward()
    return before, module.weight.grad.clone()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_zero_grad_forgets_what_was_there(pool, to_none, inside):
    expected = sum(batch(2, r).sum(0) / 2 for r in range(2)).expand(2, 13)
    first = sum(batch(0, r).sum(0) / 2 for r in range(2)).expand(2, 13)
    for before, after in pool(2).run(zeroed, to_none, inside):
        torch.testing.assert_close(after, expected)
        if not inside:
            torch.testing.assert_close(before, first)


def reentrant(use_reentrant):
    torch.manual_seed(0)
    layer, head = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
    model = SharedParameters(nn.ModuleList([layer, head]))
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True) * (dist.get_rank() + 1)
    for _ in range(2):
        x = checkpoint(layer, x, use_reentrant=use_reentrant).tanh()
    head(x).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_a_layer_that_a_reentrant_checkpoint_runs_twice_gets_both_gradients(pool):
    for twice, once in zip(
        pool(2).run(reentrant, True), pool(2).run(reentrant, False), strict=True
    ):
        torch.testing.assert_close(twice, once)


class Slow(torch.optim.SGD):
    """Rank 1 takes its time."""

    def step(self, closure=None):
        if dist.get_rank() == 1:
            time.sleep(0.3)
        return super().step(closure)


def seen_around_a_slow_step(slow_forward):
    module = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(module.weight)
    model = SharedParameters(module)
    optimizer = SharedOptimizer(model.parameters(), Slow, lr=1.0)
    model(torch.ones(1, 64)).sum().backward()
    if slow_forward and dist.get_rank() == 1:
        time.sleep(0.3)
        before = module.weight.unique().tolist()  # a late look, before its own step
    else:
        before = [0.0]
    optimizer.step()
    return before, module.weight.unique().tolist()


@pytest.mark.parametrize("slow_forward", [True, False])
def test_nobody_sees_parameters_change_before_its_step_or_after_it(pool, slow_forward):
    assert pool(3).run(seen_around_a_slow_step, slow_forward) == [([0.0], [-1.0])] * 3


def changed_graph():
    model = SharedParameters(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    optimizer = SharedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    loss = model(torch.ones(1, 64)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_from_before_the_step_is_not_valid_after_it_on_any_rank(pool):
    pool(2).run(changed_graph)


def clipped(ours):
    module = cruel()
    model = SharedParameters(module) if ours else module
    if not ours:
        n = dist.get_world_size()
        sum(module(batch(0, r)).square().sum() / n for r in range(n)).backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    else:
        optimizer = SharedOptimizer(model.parameters())
        model(batch(0, dist.get_rank())).square().sum().backward()
        norm = optimizer.clip_grad_norm_(0.5)
    return norm, [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_clipping_equals_torchs_on_one_process(pool, n):
    for (norm, grads), (expected_norm, expected) in zip(
        pool(n).run(clipped, True), pool(n).run(clipped, False), strict=True
    ):
        torch.testing.assert_close((norm, grads), (expected_norm, expected))


def groups_and_schedule(ours):
    module = cruel()
    model = SharedParameters(module) if ours else module
    weights = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": weights, "lr": 0.05}]
    make = SharedOptimizer if ours else plain
    optimizer = make(groups, torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    n, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        optimizer.zero_grad()
        if ours:
            model(batch(step, rank)).square().mean().backward()
        else:
            sum(module(batch(step, r)).square().mean() / n for r in range(n)).backward()
        optimizer.step()
        schedule.step()
    return values(module)


@pytest.mark.parametrize("n", [2, 4])
def test_groups_and_schedules_work_as_with_torchs_optimizer(pool, n):
    ours, expected = pool(n).run(groups_and_schedule, True), pool(n).run(groups_and_schedule, False)
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-10)


def resumed(interrupted):
    """Two steps and two more, with everything saved and loaded into new objects between."""
    rank = dist.get_rank()

    def fresh():
        model = SharedParameters(cruel())
        return model, SharedOptimizer(model.parameters(), lr=0.01)

    model, optimizer = fresh()
    for step in range(4):
        if step == 2 and interrupted:
            saved = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
            model, optimizer = fresh()
            optimizer.step()  # no gradients yet: nothing changes
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
    return values(model), [v for v in model.state_dict().values() if v.is_floating_point()]


@pytest.mark.parametrize("n", [1, 3])
def test_states_saved_and_loaded_go_on_as_if_nothing_had_happened(pool, n):
    ours, expected = pool(n).run(resumed, True), pool(n).run(resumed, False)
    assert all(same_bits(a[0], b[0]) for a, b in zip(ours, expected, strict=True))


def other_pieces():
    model = SharedParameters(nn.Linear(64, 64))
    optimizer = SharedOptimizer(model.parameters())
    saved = optimizer.state_dict() | {"pieces": [["module.weight", 0, 7]]}
    with pytest.raises(ValueError, match="load what the same rank saved"):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match="assign=True"):
        model.load_state_dict(model.state_dict(), assign=True)


def test_states_of_other_pieces_and_other_tensors_are_refused(pool):
    pool(2).run(other_pieces)


def message(build):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        build(dist.get_rank())
    return str(caught.value)


def other_shape(rank):
    SharedParameters(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4 + rank)))


def other_dtype(rank):
    SharedParameters(nn.Linear(3, 3).to([torch.float16, torch.bfloat16][rank % 2]))


def other_freezing(rank):
    SharedParameters(nn.Linear(3, 3).requires_grad_(rank == 1))


def on_meta(rank):
    SharedParameters(nn.Linear(3, 3, device="meta" if rank == 1 else "cpu"))


def lazy(rank):
    SharedParameters(nn.LazyLinear(3))


def on_two_machines(rank):
    names = [("alpha", "1"), ("beta", "2"), ("alpha", "1")]
    before, shared_memory.machine = shared_memory.machine, lambda: names[rank]
    try:
        SharedParameters(nn.Linear(3, 3))
    finally:
        shared_memory.machine = before


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (other_shape, ["parameter 1.weight (4, 3)", "parameter 1.weight (5, 3)", "rank 2"]),
        (other_dtype, ["weight (3, 3) float16", "weight (3, 3) bfloat16"]),
        (other_freezing, ["weight", "requires_grad", "rank 1"]),
        (on_meta, ["rank 1: parameter weight is on meta", "use DDP"]),
        (lazy, ["parameter weight has no shape yet"]),
        (on_two_machines, ["rank 0 on alpha, rank 1 on beta", "pass group="]),
    ],
)
def test_what_cannot_be_shared_is_refused_in_the_same_words_on_every_rank(pool, build, words):
    said = pool(3).run(message, build)
    assert len(set(said)) == 1
    assert all(word in said[0] for word in words), said[0]


def small():
    model = SharedParameters(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), timeout_s=5.0)
    return model, SharedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


def clip_in_place(rank):
    model, optimizer = small()
    model(torch.ones(1, 4)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def step_on_private_gradients(rank):
    model, optimizer = small()
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def unfreeze(rank):
    module = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    model = SharedParameters(module)
    optimizer = SharedOptimizer(model.parameters())
    module[0].weight.requires_grad_(True)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def replace(rank):
    model, optimizer = small()
    model.module[1].weight = nn.Parameter(torch.ones(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def move(rank):
    model, optimizer = small()
    model.double()
    optimizer.step()


def add(rank):
    model, optimizer = small()
    model.module.append(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def other_rates(rank):
    model, optimizer = small()
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def skip_a_backward(rank):
    model, optimizer = small()
    if rank == 0:
        model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def sparse(rank):
    model = SharedParameters(nn.Embedding(4, 2, sparse=True))
    model(torch.tensor([1])).sum().backward()


def create_graph(rank):
    model, _ = small()
    model(torch.ones(1, 4)).square().sum().backward(create_graph=True)


def whole_parameters(rank):
    model, _ = small()
    SharedOptimizer(model.parameters(), torch.optim.LBFGS)


def not_shared(rank):
    SharedOptimizer(nn.Linear(2, 2).parameters())


def all_frozen(rank):
    SharedOptimizer(SharedParameters(nn.Linear(2, 2).requires_grad_(False)).parameters())


def deepcopy(rank):
    copy.deepcopy(small()[0])


def to_pickle(rank):
    pickle.dumps(small()[0])


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (clip_in_place, "0.weight was changed outside .* optimizer.clip_grad_norm_"),
        (step_on_private_gradients, "0.weight was made outside of a synchronised backward"),
        (unfreeze, "parameter 0.weight has been unfrozen"),
        (replace, "parameter 1.weight has been replaced or moved"),
        (move, "parameter 0.weight has been replaced or moved"),
        (add, "parameter 2.weight has been added"),
        (other_rates, r"rank 0: step with lr 0.1\n .*rank 1: step with lr 0.2"),
        (skip_a_backward, r"rank 0: backward 1\n .*rank 1: step"),
        (sparse, "gradient of weight is sparse"),
        (create_graph, "gradient of 1.(weight|bias) is sparse or has a graph of its own"),
        (whole_parameters, "LBFGS looks at whole parameters"),
        (not_shared, r"of shape \(2, 2\) is not shared"),
        (all_frozen, "nothing to optimize"),
        (deepcopy, "copy model.module"),
        (to_pickle, "save state_dict"),
    ],
)
def test_what_would_be_silently_wrong_is_refused_by_name(pool, do, words):
    for said in pool(2).run(message, do):
        assert re.search(words, said), said


def frozen_later():
    """Frozen after it was shared: no gradient, not moved; the others train on."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = SharedParameters(module)
    optimizer = SharedOptimizer(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).square().sum().backward()
        optimizer.step()
        if step == 0:
            module[0].requires_grad_(False)
            before = values(module)
    return [torch.equal(a, b) for a, b in zip(before, values(module), strict=True)]


def test_what_is_frozen_later_stays_where_it_is(pool):
    assert pool(2).run(frozen_later) == [[True, True, False, False]] * 2


def a_private_copy():
    """A deep copy of the inner module is nobody else's."""
    module = small()[0].module
    private = copy.deepcopy(module)
    private[0].weight.data.fill_(dist.get_rank() + 1)
    private(torch.ones(1, 4)).sum().backward()
    dist.barrier()
    return private[0].weight.unique().tolist(), module[0].weight.numel()


def test_a_copy_of_the_inner_module_is_private(pool):
    assert pool(2).run(a_private_copy) == [([1.0], 16), ([2.0], 16)]


def at_rest():
    """Whether all that was mapped is unmapped once the objects are gone."""
    gc.collect()  # what other tests left
    before = len(os.listdir("/proc/self/fd")), shared_kb()["Rss"]
    model, optimizer = small()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    during = shared_kb()["Rss"]
    del model, optimizer
    gc.collect()
    return before == (len(os.listdir("/proc/self/fd")), shared_kb()["Rss"]), during > 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what is shared")
def test_memory_is_given_back_with_the_module(pool):
    assert pool(2).run(at_rest) == [(True, True)] * 2


def dies_in_backward():
    """Rank 1 is killed while the others wait for its gradients; they say so soon."""
    model, _ = small()
    loss = model(torch.ones(1, 4)).sum()
    if dist.get_rank() == 1:
        os._exit(3)
    start_s = time.monotonic()
    try:
        loss.backward()
    except RuntimeError as error:
        print(f"after {math.ceil(time.monotonic() - start_s)} s: {error}", flush=True)
    time.sleep(30)


@pytest.mark.slow
def test_a_peer_that_dies_is_named_soon_and_leaves_nothing(capfd):
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    with Ranks(2, backend="gloo", timeout_s=20.0) as ranks:
        with pytest.raises(RankError) as caught:
            ranks.run(dies_in_backward)
    assert (caught.value.kind, caught.value.rank) == ("died", 1)
    if Path("/dev/shm").exists():
        assert {name for name in os.listdir("/dev/shm") if "pdt" in name} <= before


def late(timeout_s):
    model = SharedParameters(nn.Linear(2, 2), timeout_s=timeout_s)
    if dist.get_rank() == 1:
        time.sleep(1.0)
        return ""
    return message(lambda rank: model(torch.ones(1, 2)).sum().backward())


@pytest.mark.slow
def test_a_peer_that_does_not_come_is_named():
    with Ranks(3, backend="gloo", timeout_s=30.0) as ranks:
        said = ranks.run(late, 0.3)
    named = [text for text in said if "ranks [1] have not come" in text]
    assert named  # the other was told by this one, or found out as well
    assert all("rank" in text for text in (said[0], said[2]))


def in_two_groups():
    """Pairs of ranks that share among themselves, as two nodes would."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[dist.get_rank() // 2]
    model = SharedParameters(nn.Linear(2, 2), group=group)
    if dist.get_rank(group) == 0:
        model.module.weight.data.fill_(dist.get_rank())
    dist.barrier(group)
    return model.module.weight.unique().tolist()


def test_a_group_shares_among_its_own_ranks(pool):
    assert pool(4).run(in_two_groups) == [[0.0], [0.0], [2.0], [2.0]]


def buffers():
    model = SharedParameters(nn.BatchNorm1d(3))
    start = model.module.running_mean.clone()
    model(torch.full((2, 3), float(dist.get_rank())))
    return start.tolist(), model.module.running_mean.unique().numel(), model.module.running_mean[0]


def test_buffers_start_as_rank_0s_and_stay_private(pool):
    seen = pool(2).run(buffers)
    assert seen[0][0] == seen[1][0]
    assert seen[0][2] != seen[1][2]
