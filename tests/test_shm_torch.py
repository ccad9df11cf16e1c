"""torch's own wrappers train on the shared-memory backend just as they do on gloo."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdt.comm.shm import ShmGroup


def groups() -> dict[str, dist.ProcessGroup]:
    """In a rank: all ranks as a group of each backend, without meter."""

    def create(store, rank, size, timeout):
        return ShmGroup(store, rank, size, timedelta(seconds=30))

    dist.Backend._plugins.pop("SHM_TEST", None)
    dist.Backend.register_backend("shm_test", create, devices=["cpu"])
    return {name: dist.new_group(backend=name) for name in ("gloo", "shm_test")}


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16)]
    return nn.Sequential(*layers).double()  # so that the order of sums, which differs, is not seen


def mesh_of(group):
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("axis",))


def batch(step: int, same: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + (0 if same else dist.get_rank()))
    return torch.randn(8, 16, generator=generator, dtype=torch.float64)


def trained(module, optimizer, same=False) -> list[torch.Tensor]:
    for step in range(4):
        optimizer.zero_grad()
        module(batch(step, same)).square().mean().backward()
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return [parameter.detach().clone() for parameter in whole]


def ddp(group):
    wrapped = nn.parallel.DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.01)
    return trained(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9))


def ddp_hook(group):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapped = nn.parallel.DistributedDataParallel(model(), process_group=group)
    wrapped.register_comm_hook(group, default_hooks.allreduce_hook)
    return trained(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1))


def zero(group):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.Adam, process_group=group, lr=0.01
    )
    return trained(wrapped, optimizer)


def fsdp2(group):
    from torch.distributed.fsdp import fully_shard

    module, mesh = model(), mesh_of(group)
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    return trained(module, torch.optim.AdamW(module.parameters(), 0.01))


def tensor_parallel(group):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    module = model()
    parallelize_module(module, mesh_of(group), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return trained(module, torch.optim.SGD(module.parameters(), 0.1), same=True)


def pipeline(group):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, n = group.rank(), group.size()
    torch.manual_seed(rank)
    part = nn.Sequential(nn.Linear(16, 16), nn.GELU()).double()
    stage = PipelineStage(part, rank, n, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    x, target = batch(0, same=True), batch(1, same=True)
    if rank == 0:
        schedule.step(x)
    elif rank == n - 1:
        schedule.step(target=target)
    else:
        schedule.step()
    return [parameter.grad for parameter in part.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("train", [ddp, ddp_hook, zero, fsdp2, tensor_parallel, pipeline])
def test_training_equals_gloo(pool, train, world_size):
    if train is tensor_parallel and world_size == 3:
        pytest.skip("64 columns do not divide by 3")

    def run():
        results = {name: train(group) for name, group in groups().items()}
        torch.testing.assert_close(results["shm_test"], results["gloo"])
        assert all(torch.isfinite(tensor).all() for tensor in results["shm_test"])

    pool(world_size).run(run)
