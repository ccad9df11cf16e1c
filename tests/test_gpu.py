"""What only a GPU can show: NCCL under the meter, ranks that share a GPU, CUDA in the parent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdt import Ranks
from pdt.comm import meter
from pdt.ranks import device

pytestmark = pytest.mark.gpu


def one_step():
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(device())
    ddp = nn.parallel.DistributedDataParallel(model)
    with meter() as m:
        ddp(torch.ones(2, 8, device=device())).sum().backward()
    torch.cuda.synchronize()
    return m.total("all_reduce").nbytes, str(device()), model.weight.grad


def test_torch_s_ddp_on_nccl_is_counted():
    with Ranks(1, backend="nccl") as ranks:
        ((nbytes, name, grad),) = ranks.run(one_step)
    assert (nbytes, name) == (4 * 72, "cuda:0")
    assert grad.device.type == "cpu"
    assert torch.equal(grad, torch.full((8, 8), 2.0))


def test_every_collective_runs_on_nccl():
    def fn():
        t = torch.ones(4, device=device())
        with meter() as m:
            dist.all_reduce(t)
            dist.broadcast(t, 0)
            dist.all_gather([t.clone()], t)
            dist.all_gather_into_tensor(t.clone(), t)
            dist.reduce_scatter_tensor(t.clone(), t)
            dist.all_to_all_single(t.clone(), t)
            dist.barrier()
        return m.ops()

    with Ranks(1, backend="nccl") as ranks:
        assert ranks.run(fn)[0] == [
            "all_reduce",
            "broadcast",
            "all_gather",
            "reduce_scatter",
            "all_to_all",
            "barrier",
        ]


def test_ranks_over_gloo_share_one_gpu_when_asked():
    def fn():
        place = device(share_gpu=True)
        tensor = torch.full((3,), float(dist.get_rank() + 1), device=place)
        with meter() as m:
            dist.all_reduce(tensor)
        return place.type, tensor, m.total().nbytes

    with Ranks(2, backend="gloo") as ranks:
        for kind, tensor, nbytes in ranks.run(fn):
            assert (kind, nbytes) == ("cuda", 12)
            assert torch.equal(tensor, torch.full((3,), 3.0))


def test_ranks_start_after_the_parent_has_initialised_cuda():
    torch.ones(1, device="cuda").sum().item()
    with Ranks(1) as ranks:
        assert ranks.run(lambda: torch.ones(3, device="cuda").sum()) == [torch.tensor(3.0)]


def train_both(place: torch.device, steps: int = 3):
    """Per step, whether pdt's DDP and torch's leave equal gradients; and the calls of each."""
    from pdt.ddp import DDP

    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(place)
    calls, grads = [], []
    for wrap in (DDP, nn.parallel.DistributedDataParallel):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(place))
        for _ in range(steps):
            model.zero_grad()
            with meter() as m:
                model(x).square().mean().backward()
        calls.append([(record.op, record.nbytes) for record in m.records])
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.cuda.synchronize()
    return [torch.equal(a, b) for a, b in zip(*grads, strict=True)], *calls


@pytest.mark.parametrize(("world_size", "backend"), [(1, "nccl"), (2, "gloo")])
def test_ddp_equals_torch_s_on_a_gpu(world_size, backend):
    def fn():
        return train_both(device(share_gpu=backend == "gloo"))

    with Ranks(world_size, backend=backend) as ranks:
        for equal, ours, theirs in ranks.run(fn):
            assert all(equal)
            assert ours == theirs


def test_ddp_does_not_wait_for_the_gpu_in_a_step():
    """No synchronisation beyond torch's own: CUDA would raise in debug mode."""

    def fn():
        from pdt.ddp import DDP

        model = DDP(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).to(device()))
        x = torch.randn(8, 64, device=device())
        model(x).square().mean().backward()  # the first step exchanges notes
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                model.zero_grad()
                model(x).square().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return all(p.grad is not None for p in model.parameters())

    with Ranks(1, backend="nccl") as ranks:
        assert ranks.run(fn) == [True]


def test_fp32_gradients_of_bf16_parameters_on_a_gpu():
    def fn():
        from pdt.ddp import DDP

        layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16, device=device())
        model, x = DDP(layer, grad_dtype=torch.float32), torch.ones(1, 1).bfloat16().to(device())
        with model.no_sync():
            for _ in range(599):
                model(x).backward()
        model(x).backward()
        return layer.weight.grad.item()

    with Ranks(1, backend="nccl") as ranks:
        assert ranks.run(fn) == [600.0]
