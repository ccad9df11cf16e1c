"""ZeRO's three stages beside torch's: steps in turn, in one run, on 2 and 4 ranks.

    python benchmarks/bench_zero.py [--quick]

Stages 1 and 2 beside DistributedDataParallel with ZeroRedundancyOptimizer (both with parameters
and gradients as views of buckets, and `keep_buffers`, since DDP keeps its own), stage 3 beside
FSDP2's `fully_shard`; fused AdamW and 8 samples a rank, so that the step is about communication;
gloo, shared memory and an emulated link; a model of few large parameters and one of many small
ones, each in 8 units for stage 3. For each: the ratio of step times (below 1: pdt is faster), the
ratio of peak bytes by the ledger (of tensors: what gloo allocates inside is not seen), and what a
rank holds after a step against the paper's formula.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _common import table, write_results
from torch import nn

from pdt import Ranks
from pdt.comm import Link

WIRES: dict[str, dict[str, Any]] = {
    "gloo": {"backend": "gloo"},
    "shm": {"backend": "shm"},
    "link 250 MB/s": {"backend": "gloo", "link": Link(200e-6, 2.5e8)},
}
STAGES = (1, 2, 3)
UNITS = 8
ADAMW: dict[str, Any] = {"lr": 1e-3, "fused": True}


def large() -> nn.Module:
    """Eight units of 4 MiB."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(UNITS)])


def small() -> nn.Module:
    """Eight units of 38 parameters, of 16 KiB or less."""

    def unit() -> nn.Module:
        return nn.Sequential(
            *[layer for _ in range(19) for layer in (nn.Linear(64, 64), nn.ReLU())]
        )

    return nn.Sequential(*[unit() for _ in range(UNITS)])


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "large": (large, (8, 1024)),
    "small": (small, (8, 64)),
}


def ours(stage: int, model: nn.Module) -> tuple[nn.Module, Any]:
    from pdt import zero

    if stage < 3:
        cls = zero.Zero1 if stage == 1 else zero.Zero2
        return model, cls(model.parameters(), torch.optim.AdamW, **ADAMW, keep_buffers=True)
    for unit in model.children():
        zero.fully_shard(unit)
    zero.fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def theirs(stage: int, model: nn.Module) -> tuple[nn.Module, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    if stage < 3:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return wrapped, ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in model.children():
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def measure(stage: int, model_name: str, repeats: int) -> dict[str, float]:
    """In a rank: the ratio of paired steps, of peaks, and what is held."""
    import copy
    from statistics import median
    from time import perf_counter

    from pdt.measure import Ledger

    torch.manual_seed(0)
    make, shape = MODELS[model_name]
    module, x = make(), torch.randn(*shape)
    peaks, held, contenders = {}, {}, {}
    for name, wrap in (("pdt", ours), ("torch", theirs)):
        model, optimizer = wrap(stage, copy.deepcopy(module))
        for _ in range(2):
            step(model, optimizer, x)
        with Ledger(model=model, optimizer=optimizer) as ledger:
            step(model, optimizer, x)
            held[name] = sum(
                ledger.live()[kind] for kind in ("parameters", "gradients", "optimizer states")
            )
        peaks[name] = ledger.peak_total
        contenders[name] = model, optimizer

    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats):
        for name in ["pdt", "torch"] if turn % 2 else ["torch", "pdt"]:
            dist.barrier()
            start = perf_counter()
            step(*contenders[name], x)
            dist.barrier()
            seconds[name].append(perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["pdt"], seconds["torch"], strict=True)]
    numel, n = sum(p.numel() for p in module.parameters()), dist.get_world_size()
    return {
        "pdt/torch": median(ratios[2:]),
        "pdt_ms": median(seconds["pdt"][2:]) * 1e3,
        "torch_ms": median(seconds["torch"][2:]) * 1e3,
        "peak pdt/torch": peaks["pdt"] / peaks["torch"],
        "peak_mib": peaks["pdt"] / 2**20,
        "held/formula": held["pdt"] / state_nbytes(numel, n, stage),
    }


def state_nbytes(numel: int, n: int, stage: int) -> float:
    """Parameters, gradients and AdamW's states in fp32 on one rank after a step."""
    gradients, parameters = (1 if stage < 2 else n), (1 if stage < 3 else n)
    return 4 * numel / parameters + 4 * numel / gradients + 8 * numel / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--stage", type=int, choices=STAGES, help="one stage, without a file")
    args = parser.parse_args()
    rows = []
    for wire, options in WIRES.items():
        for n in (2, 4):
            for model_name in MODELS:
                for stage in [args.stage] if args.stage else STAGES:
                    with Ranks(n, timeout_s=300, **options) as ranks:
                        found = ranks.run(measure, stage, model_name, 8 if args.quick else 14)[0]
                    if wire == "shm":  # its slots would count for whoever touches them first
                        found["peak pdt/torch"] = found["peak_mib"] = None
                    rows.append(
                        {"stage": stage, "wire": wire, "ranks": n, "model": model_name, **found}
                    )
                    print(table(rows[-1:], floatfmt=".3g"), flush=True)
    print(table(rows, floatfmt=".3g"))
    if not args.stage:
        print(write_results("zero", rows))


if __name__ == "__main__":
    main()
