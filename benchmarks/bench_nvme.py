"""Files beside `dd`, and the walk through them: throughput, stall by depth, memory.

    python benchmarks/bench_nvme.py [--folder /a/disk] [--quick]

`dd` moves the same bytes in the same blocks, with the same flags, one file after the other; both
are taken in turn, and the medians compared. `pdt` checks its checksums, which `dd` has none of.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import table, write_results

from pdt.comm import Link
from pdt.offload.files import TensorFiles, aligned_empty
from pdt.offload.nvme import Item, SwapWindow

MIB = 2**20
BLOCKS_MIB = [1, 4, 16, 64]
TOTAL_MIB = 256


def seconds(call: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def dd(folder: Path, block_mib: int, direct: bool, write: bool) -> None:
    """Write or read TOTAL_MIB, in one file, by blocks."""
    flag = "direct" if direct else "fullblock"
    count = TOTAL_MIB // block_mib
    words = [f"bs={block_mib}M", f"count={count}", "status=none"]
    if write:
        words += ["if=/dev/zero", f"of={folder}/dd", "conv=notrunc"]
        words += ["oflag=direct"] if direct else []
    else:
        words += [f"if={folder}/dd", "of=/dev/null", f"iflag={flag}"]
    subprocess.run(["dd", *words], check=True)


def move(files: TensorFiles, tensors: list[torch.Tensor], write: bool) -> None:
    """Write or read TOTAL_MIB, one file a tensor, as many at a time as there are tensors."""
    names = [str(i) for i in range(TOTAL_MIB * MIB // tensors[0].nbytes)]
    call = files.write if write else files.read
    for start in range(0, len(names), len(tensors)):
        pairs = zip(names[start:], tensors, strict=False)
        for transfer in [call(name, tensor) for name, tensor in pairs]:
            transfer.wait()


def throughput(folder: Path, block_mib: int, direct: bool, repeats: int) -> list[dict[str, Any]]:
    """GB/s of writes over old content, and of reads, in blocks of this size."""
    tensors = [aligned_empty(block_mib * MIB // 4, torch.float32).uniform_() for _ in range(4)]
    ways = {
        "pdt": TensorFiles(folder, direct=direct),
        "no checksums": TensorFiles(folder, direct=direct, checksums=False),
        "nor threads": TensorFiles(folder, direct=direct, checksums=False, threads=1),
    }
    rows = []
    for write in (True, False):
        calls = {n: partial(move, files, tensors, write) for n, files in ways.items()}
        calls["dd"] = partial(dd, folder, block_mib, direct, write)
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats + 1):  # the first makes the files
            for name, call in calls.items():
                taken[name].append(seconds(call))
        rates = {n: TOTAL_MIB * MIB / median(s[1:]) / 1e9 for n, s in taken.items()}
        rows.append(
            {"what": "write" if write else "read", "direct": direct, "block MiB": block_mib}
            | {f"{name}, GB/s": rate for name, rate in rates.items()}
            | {"times faster": rates["pdt"] / rates["dd"]}
            | {"without checksums": rates["no checksums"] / rates["dd"]}
        )
    for files in ways.values():
        files.close()
    return rows


def depth(folder: Path) -> list[dict[str, Any]]:
    """Stall of a walk by depth, on an emulated disk where reading takes as long as using."""
    items = {str(i): Item(MIB // 12) for i in range(24)}  # 1 MiB each
    rows = []
    for num_buffers in (1, 2, 3, 4, 6):
        with TensorFiles(folder, link=Link(0.002, 100e6)) as files:
            with SwapWindow(files, items, num_buffers=num_buffers) as window:
                for name, item in items.items():
                    window.put(name, {p: torch.zeros(item.numel) for p in item.planes})
                window.drain()
                window.events.clear()

                def walk(window: SwapWindow = window) -> None:
                    window.plan(items)
                    for name in items:
                        with window.item(name):
                            time.sleep(0.0125)
                    window.drain()

                total_s = seconds(walk)
                rows.append(
                    {"buffers": num_buffers, "stall / walk": window.stall_s / total_s}
                    | {"walk / use": total_s / (len(items) * 0.0125)}
                )
    return rows


def peak(folder: Path, num_buffers: int) -> dict[str, Any]:
    """How much the process grows by a walk, against the memory that the window says it has."""
    items = {str(i): Item(4 * MIB) for i in range(12)}  # 48 MiB each
    zeros = torch.zeros(1).expand(4 * MIB)
    with TensorFiles(folder) as files:
        before = highest = resident()
        with SwapWindow(files, items, num_buffers=num_buffers) as window:
            for name, item in items.items():
                window.put(name, dict.fromkeys(item.planes, zeros))
            window.plan(items)
            for name in items:
                with window.item(name) as planes:
                    planes["master"].add_(1)
                    highest = max(highest, resident())
            return {
                "buffers": num_buffers,
                "states MiB": sum(item.nbytes for item in items.values()) / MIB,
                "formula MiB": window.nbytes / MIB,
                "grown by MiB": (highest - before) / MIB,
                "grown / formula": (highest - before) / window.nbytes,
            }


def resident() -> int:
    """Bytes of this process that are in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmRSS"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="where the files are made; a temporary folder otherwise")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        torch.set_num_threads(1)
        rows: list[dict[str, Any]] = []
        with TensorFiles(folder) as files:
            modes = [True, False] if files.direct else [False]
        if shutil.which("dd"):
            for direct, block_mib in product(modes, BLOCKS_MIB):
                rows += throughput(folder, block_mib, direct, 2 if args.quick else 5)
        walks, memory = depth(folder), [peak(folder, n) for n in (2, 3)]
    for part in (rows, walks, memory):
        print(table(part, floatfmt=".3g"), end="\n\n")
    print(write_results("nvme", rows, depth=walks, memory=memory))


if __name__ == "__main__":
    main()
