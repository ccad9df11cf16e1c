"""The ledger and the saved-activation count agree with counts made by hand, to the byte."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pdt.measure.memory import Ledger
from pdt.measure.saved import SavedActivations, saved_activations
from pdt.measure.storages import KINDS

DEVICES = [
    "cpu",
    "meta",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def mlp(device="cpu", width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)


def nbytes(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def without_zeros(kinds):
    return {kind: count for kind, count in kinds.items() if count}


@pytest.fixture
def one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_counted_to_the_byte_in_every_phase(device):
    model = mlp(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.zeros(3, 8, device=device)
    psi = nbytes(*model.parameters())
    with Ledger(model, optimizer) as ledger:
        assert without_zeros(ledger.snapshot("start")) == {"parameters": psi}
        loss = model(x).square().sum()
        hidden, out = 3 * 16 * 4, 3 * 4 * 4
        assert ledger.snapshot("forward") == dict.fromkeys(KINDS, 0) | {
            "parameters": psi,
            "activations": nbytes(x) + hidden + out,  # ReLU and the last Linear share `hidden`
            "other": 4,  # the loss
        }
        loss.backward()
        after = {"parameters": psi, "gradients": psi, "other": nbytes(x) + 4}
        assert without_zeros(ledger.snapshot("backward")) == after
        optimizer.step()
        steps = 4 * len(list(model.parameters()))
        after["optimizer states"] = 2 * psi + steps
        assert without_zeros(ledger.snapshot("step")) == after
        optimizer.zero_grad()
    del after["gradients"]
    assert without_zeros(ledger.live()) == after
    assert [label for label, _ in ledger.snapshots] == ["start", "forward", "backward", "step"]


def test_peak_is_the_moment_of_the_highest_total():
    with Ledger() as ledger:
        a = torch.zeros(100)
        b = torch.zeros(50)
        del a
        c = torch.zeros(60)
        del b, c
    assert ledger.peak_total == 600
    assert ledger.peak() == dict.fromkeys(KINDS, 0) | {"other": 600}
    assert ledger.live()["other"] == 0
    assert [totals["other"] for _, totals in ledger.timeline] == [400, 600, 200, 440, 240, 0]
    times = [time_s for time_s, _ in ledger.timeline]
    assert times == sorted(times)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=30))
def test_any_order_of_birth_and_death_is_followed(actions):
    held, totals = [], [0]
    with Ledger() as ledger:
        for make, number in actions:
            if make:
                held.append(torch.empty(number, 3)[:, 1:])
            elif held:
                del held[number % len(held)]
            totals.append(sum(12 * len(tensor) for tensor in held))
            assert ledger.live()["other"] == totals[-1]
    assert ledger.peak_total == max(totals)


def test_views_ties_and_odd_tensors_count_their_storage_once():
    tied = mlp()
    tied.append(nn.Linear(16, 4, bias=False))
    tied[3].weight = tied[2].weight
    tied[0].bias.requires_grad_(False)
    with Ledger(tied) as ledger:
        assert without_zeros(ledger.live()) == {
            "parameters": nbytes(*{p.data_ptr(): p for p in tied.parameters()}.values())
        }
        base = torch.zeros(4, 6)
        views = [base.t(), base[1:, ::2], base.view(-1), base.detach(), base.expand(2, 4, 6)]
        scalar, empty = torch.tensor(1.0), torch.zeros(0, 5)
        assert ledger.live()["other"] == nbytes(base, scalar, empty)
        del base, views[1:]
        assert ledger.live()["other"] == 4 * 24 + 4  # a view keeps the whole storage


def test_two_models_and_optimizers_share_one_ledger():
    first, second, third = mlp(), mlp(), mlp()
    optimizers = [torch.optim.SGD(m.parameters(), momentum=0.9) for m in (first, second)]
    with Ledger([first, second], optimizers) as ledger:
        third(second(first(torch.zeros(2, 8)).repeat(1, 2)).repeat(1, 2)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        psi = nbytes(*first.parameters())
        live = ledger.live()
        assert live["parameters"] == 3 * psi  # the third is known by its type
        assert live["gradients"] == 2 * psi
        assert live["optimizer states"] == 2 * psi
        ledger.watch(third)
        assert ledger.live()["gradients"] == 3 * psi


def test_master_copies_are_optimizer_states():
    model = mlp().bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    psi = sum(p.numel() for p in model.parameters())
    with Ledger(model, optimizer) as ledger:
        model(torch.zeros(2, 8, dtype=torch.bfloat16)).sum().backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        assert ledger.live()["parameters"] == 2 * psi
        assert ledger.live()["optimizer states"] == 12 * psi + 4 * len(masters)


@pytest.mark.parametrize("tagged", [True, False])
def test_gradients_inside_a_bucket_count_once(tagged):
    model = mlp()
    with Ledger(model) as ledger:
        bucket = torch.zeros(sum(p.numel() for p in model.parameters()))
        if tagged:
            ledger.tag(bucket, "buckets")
        offset = 0
        for parameter in model.parameters():
            parameter.grad = bucket[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        kind = "buckets" if tagged else "gradients"
        assert without_zeros(ledger.live()) == {"parameters": nbytes(bucket), kind: nbytes(bucket)}


@pytest.mark.parametrize("as_views", [True, False])
def test_buckets_of_torch_ddp_are_found(one_rank, as_views):
    model = mlp()
    psi = nbytes(*model.parameters())
    with Ledger(model) as ledger:
        ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_views)
        for _ in range(3):  # DDP makes its buckets anew before the second forward
            ddp(torch.zeros(2, 8)).sum().backward()
            live = ledger.live()
            assert live["gradients"] == psi
            assert live["buckets"] == (0 if as_views else psi)
        assert live["activations"] == 0


def test_states_of_torch_zero_redundancy_optimizer_are_found(one_rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    with Ledger(model, optimizer) as ledger:
        model(torch.zeros(2, 8)).sum().backward()
        optimizer.step()
    psi, count = nbytes(*model.parameters()), len(list(model.parameters()))
    assert ledger.live()["optimizer states"] == 2 * psi + 4 * count


def test_a_communication_hook_can_tag_the_buckets_of_an_older_ddp(one_rank):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = mlp()
    ddp = nn.parallel.DistributedDataParallel(model)
    ledger = Ledger(ddp)

    def tagging(state, bucket):
        ledger.tag(bucket.buffer(), "buckets")
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, tagging)
    with ledger:
        ddp(torch.zeros(2, 8)).sum().backward()
    psi = nbytes(*model.parameters())
    assert ledger.live()["buckets"] == ledger.live()["gradients"] == psi


def test_sharded_parameters_and_gradients_of_fsdp2_are_found(one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    psi = nbytes(*model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    with Ledger(model, optimizer) as ledger:
        assert ledger.live()["parameters"] == psi
        model(torch.zeros(2, 8)).sum().backward()
        optimizer.step()
        live = ledger.live()
    assert live["gradients"] == psi
    steps = 4 * len(list(model.parameters()))
    assert live["optimizer states"] == 2 * psi + steps
    assert ledger.peak("meta") == dict.fromkeys(KINDS, 0)  # nor do propagated shapes count


def test_resized_storages_are_seen_at_once():
    with Ledger() as ledger:
        weight = torch.zeros(100)
        weight.untyped_storage().resize_(0)
        assert ledger.live()["other"] == 0
        weight.untyped_storage().resize_(400)
        weight.resize_(50, 10)
    assert [totals["other"] for _, totals in ledger.timeline] == [400, 0, 400, 2000]


def test_activations_end_when_the_graph_lets_go():
    model = mlp()
    with Ledger(model) as ledger:
        x = torch.zeros(3, 8)
        loss = model(x).exp().sum()
        saved = nbytes(x) + 3 * 16 * 4 + 3 * 4 * 4
        assert ledger.live()["activations"] == saved
        loss.backward(retain_graph=True)
        assert ledger.live()["activations"] == saved
        loss.backward()
        assert ledger.live()["activations"] == 0
        assert ledger.live()["other"] == nbytes(x, loss)
        model(x).exp().sum()
        assert ledger.live()["activations"] == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_keeps_the_input_and_recomputes_the_rest(reentrant):
    block = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())])
    x = torch.zeros(5, 8, requires_grad=True)
    every = 5 * nbytes(x)  # the input and the output of each Tanh
    with Ledger(block) as ledger:
        out = checkpoint(block, x, use_reentrant=reentrant)
        assert ledger.snapshot("forward")["activations"] == nbytes(x)
        out.sum().backward()
        assert ledger.live()["activations"] == 0
    assert max(totals["activations"] for _, totals in ledger.timeline) == every


@pytest.mark.parametrize("outside", [True, False])
def test_offloaded_activations_are_the_copies(outside):
    x = torch.zeros(5, 8, requires_grad=True)
    offload = saved_tensors_hooks(lambda tensor: [tensor.clone()], lambda packed: packed[0])
    first, second = (offload, Ledger()) if outside else (Ledger(), offload)
    with first as one, second as two:
        ledger = one or two
        y = x.exp()
        assert ledger.live()["activations"] == nbytes(y)
        assert ledger.live()["other"] == nbytes(x, y)  # which the graph does not keep
        y.sum().backward()
        assert ledger.live()["activations"] == 0
        assert torch.equal(x.grad, torch.ones(5, 8))


def test_autocast_copies_of_weights_are_activations():
    model = nn.Linear(8, 4)
    x = torch.zeros(3, 8)
    with Ledger(model) as ledger:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        # the bf16 input; with no gradient wanted for x, the weight's copy is not kept
        assert ledger.live()["activations"] == nbytes(x) // 2
        del out
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x.requires_grad_())
        assert ledger.live()["activations"] == (nbytes(x) + nbytes(model.weight)) // 2
        assert out.dtype is torch.bfloat16


def test_sparse_gradients_are_counted_by_their_parts():
    embedding = nn.Embedding(10, 4, sparse=True)
    with Ledger(embedding) as ledger:
        embedding(torch.tensor([1, 3, 3])).sum().backward()
        assert ledger.live()["gradients"] == 3 * 8 + 3 * 4 * 4


def test_training_is_unchanged_under_the_ledger():
    def train():
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        for seed in range(3):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            model(x).exp().sum().backward()
            optimizer.step()
        return list(model.parameters())

    expected = train()
    with Ledger():
        observed = train()
    assert all(torch.equal(a, b) for a, b in zip(expected, observed, strict=True))


@pytest.mark.parametrize("context", [Ledger, SavedActivations])
def test_an_in_place_change_of_a_saved_tensor_is_still_refused(context):
    x = torch.zeros(3, requires_grad=True)
    with context():
        y = x.exp()
        total = y.sum()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


@pytest.mark.parametrize("context", [Ledger, SavedActivations])
def test_the_graph_is_freed_without_the_garbage_collector(context):
    x = torch.zeros(3, requires_grad=True)
    gc.disable()
    try:
        with context():
            y = x.exp().sigmoid()
            alive = weakref.ref(y.untyped_storage())
            del y
            assert alive() is None
    finally:
        gc.enable()


def test_everything_is_put_back_after_an_exception():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    resize, enter = torch.UntypedStorage.resize_, saved_tensors_hooks.__enter__
    ledger = Ledger(model, optimizer)
    x = torch.zeros(2, 8)
    kept = []

    def fail():
        kept.append(model(x))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), ledger:
        fail()
    assert torch.UntypedStorage.resize_ is resize
    assert saved_tensors_hooks.__enter__ is enter
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    before = ledger.live(), ledger.peak(), len(ledger.timeline)
    kept.pop().sum().backward()
    x.untyped_storage().resize_(0)
    assert (ledger.live(), ledger.peak(), len(ledger.timeline)) == before
    assert before[0]["activations"] > 0


def test_ledgers_do_not_nest_and_serve_once():
    with Ledger() as outer:
        with pytest.raises(RuntimeError, match="inside another"):
            Ledger().__enter__()
        x = torch.zeros(5)
        assert outer.live()["other"] == nbytes(x)
    with pytest.raises(RuntimeError, match="opened once"):
        outer.__enter__()
    with pytest.raises(ValueError, match="none of"):
        outer.tag(x, "gradient")


def test_devices_are_told_apart():
    with Ledger() as ledger:
        here, nowhere = torch.zeros(10), torch.zeros(1000, device="meta")
        assert ledger.live("cpu")["other"] == nbytes(here)
        assert ledger.live("meta")["other"] == nbytes(nowhere)
        assert ledger.peak_total == nbytes(here, nowhere)
        assert ledger.peak("cuda") == dict.fromkeys(KINDS, 0)


def test_the_table_names_each_snapshot_and_the_peak():
    model = mlp()
    with Ledger(model) as ledger:
        ledger.snapshot("before")
    lines = ledger.table().splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["before", "at exit", "peak"]
    assert all(str(nbytes(*model.parameters())) in line for line in lines[2:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_allocator_agrees_up_to_its_rounding():
    torch.zeros(1, device="cuda")
    before = torch.cuda.memory_allocated()
    with Ledger() as ledger:
        held = [torch.zeros(1 << 20, device="cuda") for _ in range(3)]
        del held[1]
    figures = ledger.allocator()["cuda:0"]
    assert figures["peak allocated"] - before == ledger.peak_total == 3 << 22
    assert figures["allocated"] - before == ledger.live("cuda")["other"]


class Block(nn.Module):
    """The transformer block whose activations Korthikanti et al. 2022 count, unfused."""

    def __init__(self, hidden, heads, **to):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, **to) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(hidden, hidden, **to) for _ in range(3))
        self.proj = nn.Linear(hidden, hidden, **to)
        self.up = nn.Linear(hidden, 4 * hidden, **to)
        self.down = nn.Linear(4 * hidden, hidden, **to)

    def forward(self, x):  # (b, s, h)
        y = self.norms[0](x)
        q, k, v = (linear(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in self.qkv)
        scores = q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5  # (b, a, s, s)
        context = (dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)
        x = x + dropout(self.proj(context))
        return x + dropout(self.down(nn.functional.gelu(self.up(self.norms[1](x)))))


def dropout(x):
    return torch.native_dropout(x, 0.1, True)[0]  # its mask is one byte on every device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("s", "b", "h", "a"), [(16, 2, 32, 4), (12, 1, 24, 3)])
def test_a_block_keeps_what_the_formula_of_korthikanti_says(device, s, b, h, a):
    block = Block(h, a, device=device, dtype=torch.bfloat16)
    x = torch.zeros(b, s, h, device=device, dtype=torch.bfloat16, requires_grad=True)
    kept = saved_activations(block, x, model=block)
    norms = [tensor for tensor in kept if tensor.shape == (b, s, 1)]
    assert len(norms) == 4  # mean and reciprocal deviation of two layer norms
    formula = s * b * h * 34 + 5 * a * s * s * b
    assert sum(tensor.nbytes for tensor in kept) - sum(t.nbytes for t in norms) == formula
    with Ledger(block) as ledger:
        out = block(x)
        assert ledger.live()["activations"] == sum(tensor.nbytes for tensor in kept)
        del out


def test_saved_activations_follow_the_graph():
    model = nn.Linear(8, 4)
    x = torch.zeros(3, 8, requires_grad=True)
    with SavedActivations() as saved:
        y = model(x)[:, :2].exp()
        assert [(t.shape, t.nbytes) for t in saved.tensors] == [((3, 8), 96), ((3, 2), 24)]
        z = model(x).tanh()
        assert saved.nbytes == 96 + 24 + 48  # x is kept once
        del z
        assert saved.nbytes == 96 + 24
        y.sum().backward()
        assert saved.nbytes == 0


def test_views_of_parameters_are_no_activations():
    weight = nn.Parameter(torch.zeros(8, 8))
    model = nn.Linear(8, 8)
    x = torch.zeros(3, 8)
    assert saved_activations(lambda: (x.requires_grad_() @ weight[:, :4]).sum())[0].nbytes == 96
    flat = model.weight.detach().view(-1)
    kept = saved_activations(lambda: x * flat[:8], model=model)
    assert [t.shape for t in kept] == []
    assert len(saved_activations(lambda: x * flat[:8])) == 1
