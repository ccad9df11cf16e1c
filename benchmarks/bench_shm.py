"""The shared-memory backend beside gloo: one collective of each in turn, 1 kB to 64 MB.

    python benchmarks/bench_shm.py [--ranks 2 4] [--quick]

Both are plain groups of torch.distributed, without meter; the times are medians on rank 0, taken
between barriers of both groups.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from _common import table, write_results

from pdt import Ranks

NBYTES = [2**10, 2**14, 2**16, 2**20, 2**23, 2**26]
OPS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]


def call(op: str, group: dist.ProcessGroup, whole: torch.Tensor, part: torch.Tensor) -> None:
    # The names of torch 2.13, whose old ones warn.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    if op == "all_reduce":
        dist.all_reduce(whole, group=group)
    elif op == "broadcast":
        dist.broadcast(whole, 0, group=group)
    elif op == "all_gather":
        all_gather(whole, part, group=group)
    else:
        reduce_scatter(part, whole, group=group)


def times(quick: bool) -> dict[tuple[str, int], dict[str, float]]:
    """In a rank: the median seconds of each operation and size, by backend."""
    from statistics import median
    from time import perf_counter

    from pdt.comm.shm import ShmGroup

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> ShmGroup:
        return ShmGroup(store, rank, size, timeout)

    dist.Backend.register_backend("bench_shm", create, devices=["cpu"])
    groups = {"gloo": dist.new_group(backend="gloo"), "shm": dist.new_group(backend="bench_shm")}
    found = {}
    for op in OPS:
        for nbytes in NBYTES:
            whole, taken = torch.zeros(nbytes // 4), {name: [] for name in groups}
            part = torch.zeros(nbytes // 4 // dist.get_world_size())
            for _ in range((30 if nbytes < 2**20 else 7) // (3 if quick else 1) + 2):
                for name, group in groups.items():
                    for each in groups.values():
                        dist.barrier(group=each)
                    start = perf_counter()
                    call(op, group, whole, part)
                    taken[name].append(perf_counter() - start)
            found[op, nbytes] = {name: median(seconds[2:]) for name, seconds in taken.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    args = parser.parse_args()
    rows = []
    for world_size in args.ranks:
        with Ranks(world_size, backend="gloo", timeout_s=300) as ranks:
            for (op, nbytes), seconds in ranks.run(times, args.quick)[0].items():
                rows.append(
                    {
                        "ranks": world_size,
                        "op": op,
                        "nbytes": nbytes,
                        "gloo_ms": seconds["gloo"] * 1e3,
                        "shm_ms": seconds["shm"] * 1e3,
                        "times faster": seconds["gloo"] / seconds["shm"],
                    }
                )
    print(table(rows, floatfmt=".3g"))
    print(write_results("shm", rows))


if __name__ == "__main__":
    main()
