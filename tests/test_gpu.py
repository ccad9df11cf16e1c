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
