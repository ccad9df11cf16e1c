"""`pdt.ddp.DDP` beside torch's DistributedDataParallel: steps in turn, in one run on 2 ranks.

    python benchmarks/bench_ddp.py [--quick]

For gloo, shared memory and two emulated links, bucket caps of 1 to 200 MiB, a model of few large
parameters, one of many small ones, and one whose backward takes time but no core, as a GPU's would:
the ratio of step times (below 1: pdt is faster), the share of the possible overlap that each
reaches (F + B + C + O is no overlap, F + max(B, C) + O all of it; forward, backward, communication,
optimizer), and the peak bytes by the ledger. Both have the layout of `gradient_as_bucket_view` and
make the same calls with the same bytes, which is asserted. Where cores do the communication, as on
gloo and in shared memory, it overlaps with nothing on two busy cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _common import table, write_results
from torch import nn

from pdt import Ranks
from pdt.comm import Link

CAPS = [1.0, 4.0, 25.0, 200.0]
WIRES: dict[str, dict[str, Any]] = {
    "gloo": {"backend": "gloo"},
    "shm": {"backend": "shm"},
    "link 1 GB/s": {"backend": "gloo", "link": Link(50e-6, 1e9)},
    "link 250 MB/s": {"backend": "gloo", "link": Link(200e-6, 2.5e8)},
}


def large() -> tuple[nn.Module, torch.Tensor]:
    """Eight parameters of 4 MiB, and eight biases."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(64, 1024)


def small() -> tuple[nn.Module, torch.Tensor]:
    """300 parameters of 16 KiB or less."""
    layers = [layer for _ in range(150) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(64, 64)


class Kernel(torch.autograd.Function):
    """The identity, whose backward takes 10 ms and no core."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return grad


class Slow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Kernel.apply(super().forward(x))


def device() -> tuple[nn.Module, torch.Tensor]:
    """Sixteen parameters of 1 MiB; backward takes 160 ms on a core that rests."""
    return nn.Sequential(*[Slow(512, 512) for _ in range(16)]), torch.randn(1, 512)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "large": large,
    "small": small,
    "device": device,
}


def measure(model_name: str, cap: float, repeats: int) -> dict[str, float]:
    """In a rank: ratios of paired steps, the parts of a step alone, and the peaks."""
    import copy
    from statistics import median
    from time import perf_counter

    from torch.nn.parallel import DistributedDataParallel

    from pdt.comm import meter
    from pdt.ddp import DDP
    from pdt.ddp.hooks import noop_hook
    from pdt.measure import Ledger

    torch.manual_seed(0)
    module, x = MODELS[model_name]()
    is_default = cap == 25.0  # torch makes the first bucket small when it is not told a cap
    caps = {"bucket_cap_mb": cap, "first_bucket_mb": 1.0 if is_default else cap}
    makers = {
        "pdt": lambda m: DDP(m, **caps),
        "torch": lambda m: DistributedDataParallel(
            m, bucket_cap_mb=None if is_default else cap, gradient_as_bucket_view=True
        ),
        "free": lambda m: DDP(m, comm_hook=noop_hook, **caps),
    }
    calls, peaks, models = {}, {}, {}
    for name, make in makers.items():
        model = copy.deepcopy(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with Ledger(model=model, optimizer=optimizer) as ledger:
            models[name] = make(model), optimizer
            for _ in range(3):
                with meter() as m:
                    _step(*models[name], x)
        calls[name] = [(record.op, record.nbytes) for record in m.records]
        peaks[name] = ledger.peak_total
    assert calls["pdt"] == calls["torch"], calls

    flats = [torch.zeros(nbytes // 4) for _, nbytes in calls["pdt"]]

    def communicate() -> None:
        for work in [dist.all_reduce(flat, async_op=True) for flat in flats]:
            work.wait()

    seconds: dict[str, list[float]] = {name: [] for name in [*models, "comm", "backward"]}
    for turn in range(repeats):
        first = ["pdt", "torch"] if turn % 2 else ["torch", "pdt"]  # each as often behind "comm"
        for name in [*first, "free", "comm"]:
            dist.barrier()
            start = perf_counter()
            if name == "comm":
                communicate()
            else:
                backward_s = _step(*models[name], x)
            seconds[name].append(perf_counter() - start)
            if name == "free":
                seconds["backward"].append(backward_s)
    ratios = [a / b for a, b in zip(seconds["pdt"], seconds["torch"], strict=True)]
    return {
        "ratio": median(ratios[2:]),
        **{f"{name}_s": median(values[2:]) for name, values in seconds.items()},
        "buckets": len(flats),
        "peak ratio": peaks["pdt"] / peaks["torch"],
    }


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """One step; the seconds of its backward."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    start = time.perf_counter()
    loss.backward()
    backward_s = time.perf_counter() - start
    optimizer.step()
    return backward_s


def overlap(step_s: float, found: dict[str, float]) -> float:
    """The part of what could be hidden that is: 0 for communication after backward."""
    rest = found["free_s"] - found["backward_s"]
    none = rest + found["backward_s"] + found["comm_s"]
    all_of_it = rest + max(found["backward_s"], found["comm_s"])
    return (none - step_s) / (none - all_of_it)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and caps")
    args = parser.parse_args()
    rows = []
    for wire, options in WIRES.items():
        for model_name in MODELS:
            for cap in CAPS[1:3] if args.quick else CAPS:
                with Ranks(2, timeout_s=300, **options) as ranks:
                    found = ranks.run(measure, model_name, cap, 8 if args.quick else 14)[0]
                    rows.append(
                        {
                            "wire": wire,
                            "model": model_name,
                            "cap_mib": cap,
                            "buckets": found["buckets"],
                            "pdt/torch": found["ratio"],
                            "pdt_ms": found["pdt_s"] * 1e3,
                            "torch_ms": found["torch_s"] * 1e3,
                            "free_ms": found["free_s"] * 1e3,
                            "comm_ms": found["comm_s"] * 1e3,
                            "overlap pdt": overlap(found["pdt_s"], found),
                            "overlap torch": overlap(found["torch_s"], found),
                            # shm's slots would count for whoever touches them first
                            "peak pdt/torch": None if wire == "shm" else found["peak ratio"],
                        }
                    )
                    print(table(rows[-1:], floatfmt=".3g"), flush=True)
    print(table(rows, floatfmt=".3g"))
    print(write_results("ddp", rows))


if __name__ == "__main__":
    main()
