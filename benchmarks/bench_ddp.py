"""`pdt.ddp.DDP` beside torch's DistributedDataParallel: steps in turn, in one run on 2 ranks.

    python benchmarks/bench_ddp.py [--quick]

For gloo, shared memory and two emulated links, bucket caps of 1 to 200 MiB, a model of few large
and one of many small parameters: the ratio of step times (below 1: pdt is faster), the share of the
possible overlap that each reaches, and the peak bytes by the ledger. Both have
`gradient_as_bucket_view`'s layout and the same calls and bytes, which is asserted.
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


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {"large": large, "small": small}


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

    seconds: dict[str, list[float]] = {name: [] for name in [*models, "comm"]}
    for turn in range(repeats):
        names = list(models) if turn % 2 else list(models)[::-1]
        for name in [*names, "comm"]:
            dist.barrier()
            start = perf_counter()
            communicate() if name == "comm" else _step(*models[name], x)
            seconds[name].append(perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["pdt"], seconds["torch"], strict=True)]
    return {
        "ratio": median(ratios[2:]),
        **{f"{name}_s": median(values[2:]) for name, values in seconds.items()},
        "buckets": len(flats),
        "peak ratio": peaks["pdt"] / peaks["torch"],
    }


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and caps")
    args = parser.parse_args()
    rows = []
    for wire, options in WIRES.items():
        with Ranks(2, timeout_s=300, **options) as ranks:
            for model_name in MODELS:
                for cap in CAPS[1:3] if args.quick else CAPS:
                    found = ranks.run(measure, model_name, cap, 8 if args.quick else 22)[0]
                    # no overlap: the free step, then all communication; the bound: the longer
                    slowest = found["free_s"] + found["comm_s"]
                    bound = max(found["free_s"], found["comm_s"])
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
                            "overlap pdt": (slowest - found["pdt_s"]) / (slowest - bound),
                            "overlap torch": (slowest - found["torch_s"]) / (slowest - bound),
                            "peak pdt/torch": found["peak ratio"],
                        }
                    )
                    print(table(rows[-1:], floatfmt=".3g"), flush=True)
    print(table(rows, floatfmt=".3g"))
    print(write_results("ddp", rows))


if __name__ == "__main__":
    main()
