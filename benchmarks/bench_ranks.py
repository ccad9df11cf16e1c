"""`Ranks`: warm start and empty call, beside starting processes by spawn; memory of a rank."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time

from _common import table, write_results

from pdt import Ranks
from pdt.ranks.launcher import fork_server

STARTS, CALLS, SPAWNS = 7, 50, 3


def idle() -> None:
    pass


def import_torch() -> None:
    import torch.distributed  # noqa: F401


def seconds(fn) -> float:
    started_s = time.perf_counter()
    fn()
    return time.perf_counter() - started_s


def own_nbytes(pid: int) -> int:
    """The rank's proportional share of memory: pages shared with others are divided."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def start_and_close(world_size: int) -> float:
    started_s = time.perf_counter()
    with Ranks(world_size, backend="gloo"):
        return time.perf_counter() - started_s


def spawn(world_size: int) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=import_torch) for _ in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def main() -> None:
    first_s = seconds(fork_server)
    rows = [{"what": "first start of the fork server", "median_s": first_s}]
    for world_size in (2, 4):
        warm_s = statistics.median(start_and_close(world_size) for _ in range(STARTS))
        with Ranks(world_size, backend="gloo") as ranks:
            call_s = statistics.median(seconds(lambda r=ranks: r.run(idle)) for _ in range(CALLS))
            memory = statistics.median(map(own_nbytes, ranks.run(os.getpid)))
        spawn_s = statistics.median(seconds(lambda n=world_size: spawn(n)) for _ in range(SPAWNS))
        rows += [
            {"what": f"warm start of {world_size} ranks", "median_s": warm_s},
            {"what": f"empty call on {world_size} ranks", "median_s": call_s},
            {"what": f"memory of one of {world_size} idle ranks", "nbytes": memory},
            {"what": f"spawn of {world_size} processes that import torch", "median_s": spawn_s},
            {"what": f"spawn / warm start, {world_size} ranks", "ratio": spawn_s / warm_s},
        ]
    print(table(rows))
    write_results("ranks", rows)


if __name__ == "__main__":
    main()
