"""A step with states on the host, against its bound; and the memory that training from files takes.

    python benchmarks/bench_offload.py [--quick]

The device computes without a core (it sleeps), the bus is emulated, the host's AdamW is real. The
bound is the longest of what the device, each direction of the bus, and the host need by themselves;
one after the other they take their sum. Steps of all variants alternate in one run.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import table, write_results
from torch import nn

from pdt.comm import Link
from pdt.offload import Bus, OffloadedAdamW
from pdt.offload.files import TensorFiles

LAYERS, WIDTH = 16, 1024
FORWARD_S, BACKWARD_S = 3e-3, 6e-3  # of a layer on the device
BANDWIDTH = 800e6
VARIANTS: dict[str, dict[str, Any]] = {
    "at the end, in one piece": {"during_backward": False, "transfer_cap_mb": 1e6},
    "during backward, in pieces": {"transfer_cap_mb": 4.0},
    "one step late": {"transfer_cap_mb": 4.0, "delay_after": 0},
    "waited for in forward": {"transfer_cap_mb": 4.0},
    "one step late, waited for in forward": {"transfer_cap_mb": 4.0, "delay_after": 0},
}


class Device(torch.autograd.Function):
    """The time that a layer takes, without a core."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S)
        return grad


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Device.apply(super().forward(x))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    model(x).sum().backward()
    if optimizer is not None:
        optimizer.step()


def seconds(*args: Any) -> float:
    started_s = time.perf_counter()
    step(*args)
    return time.perf_counter() - started_s


def step_times(repeats: int) -> list[dict[str, Any]]:
    x, contenders = torch.ones(1, WIDTH), {}
    for name, options in VARIANTS.items():
        model, bus = build(), Bus(Link(50e-6, BANDWIDTH))
        contenders[name] = model, OffloadedAdamW(model.parameters(), bus=bus, **options), bus
        if "waited for" in name:
            contenders[name][1].wait_in_forward(model)
    alone = build()
    took: dict[str, list[float]] = {name: [] for name in contenders}
    device_s, host_s = [], []
    for turn in range(repeats + 2):
        device_s.append(seconds(alone, None, x))
        alone.zero_grad()
        for name, (model, optimizer, _) in contenders.items():
            optimizer.host_spans.clear()
            took[name].append(seconds(model, optimizer, x))
            if name == "at the end, in one piece":
                host_s.append(sum(span.duration_s for span in optimizer.host_spans))
        if turn == 1:  # the first steps make states and buffers
            for kept in (*took.values(), device_s, host_s):
                kept.clear()
    nbytes = sum(p.nbytes for p in alone.parameters())
    parts = {
        "device": median(device_s),
        "up": nbytes / BANDWIDTH,
        "down": nbytes / BANDWIDTH,
        "host": median(host_s),
    }
    bound_s, serial_s = max(parts.values()), sum(parts.values())
    rows = []
    for name, (_, optimizer, bus) in contenders.items():
        optimizer.synchronize()
        bus.close()
        step_s = median(took[name])
        rows.append(
            {
                "what": f"step, {name}",
                "step/bound": step_s / bound_s,
                "step/serial": step_s / serial_s,
                **{f"{part}/bound": s / bound_s for part, s in parts.items()},
            }
        )
    return rows


def peak_rss_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def train(width: int, layers: int, bus: Bus, files: TensorFiles | None) -> None:
    model = nn.Sequential(*[nn.Linear(width, width, bias=False).bfloat16() for _ in range(layers)])
    optimizer = OffloadedAdamW(model.parameters(), bus=bus, files=files, transfer_cap_mb=0.0)
    for _ in range(3):
        model(torch.ones(4, width).bfloat16()).float().sum().backward()
        optimizer.step()
    if optimizer.window is not None:
        optimizer.window.close()


def memory(in_files: bool, width: int, layers: int, pipe: Any) -> None:
    """In a process of its own: bytes at the peak of three steps, beside what the formula says."""
    torch.set_num_threads(1)
    bucket, numel = width * width, layers * width * width
    with tempfile.TemporaryDirectory() as folder, Bus() as bus:
        with TensorFiles(folder) as files:
            train(64, 4, bus, files if in_files else None)  # what is made once
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # begin the peak anew
            before = peak_rss_nbytes()
            train(width, layers, bus, files if in_files else None)
            peak = peak_rss_nbytes() - before
    moving = 2 * 3 * bucket  # gradients that leave, in 16 bits
    if in_files:  # and what returns; of the states three buckets
        formula = (2 + 2) * numel + 3 * 12 * bucket + moving + 3 * 2 * bucket
    else:
        formula = (2 + 2 + 12 + 2) * numel + moving
    pipe.send((peak, formula, numel))


def memories(quick: bool) -> list[dict[str, Any]]:
    rows, context = [], multiprocessing.get_context("spawn")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**18)  # what is freed leaves the process at once
    for in_files in (False, True):
        near, far = context.Pipe()
        width, layers = (1024, 12) if quick else (2048, 24)
        child = context.Process(target=memory, args=(in_files, width, layers, far))
        child.start()
        far.close()
        peak, formula, numel = near.recv()
        child.join(60)
        rows.append(
            {
                "what": f"memory, states in {'files' if in_files else 'memory'}",
                "peak/formula": peak / formula,
                "bytes a parameter": peak / numel,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = step_times(5 if args.quick else 15) + memories(args.quick)
    print(table(rows, floatfmt=".3g"))
    if not args.quick:
        print(write_results("offload", rows))


if __name__ == "__main__":
    main()
