"""What the meter costs: an all-reduce through the inner group and through the metered one.

On one rank the all-reduce is nearly free, and the difference is the meter alone.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from _common import table, write_results

from pdt import Ranks
from pdt.comm import meter

CASES = ((1, 16), (2, 16), (2, 1 << 18))  # ranks, elements of float32
REPEATS = 200


def measure(numel: int) -> tuple[float, float, float]:
    """Median seconds of an all-reduce: inner group, metered group, metered inside meter()."""
    tensor, inner = torch.ones(numel), dist.group.WORLD.inner
    options = dist.AllreduceOptions()
    options.asyncOp = False

    def raw() -> None:
        inner.allreduce([tensor], options).wait()

    def metered() -> None:
        dist.group.WORLD.allreduce([tensor], options).wait()

    def recorded() -> None:
        with meter():
            metered()

    seconds: dict = {raw: [], metered: [], recorded: []}
    for repeat in range(REPEATS if numel < 1 << 18 else REPEATS // 5):
        calls = list(seconds)
        for fn in calls[repeat % 3 :] + calls[: repeat % 3]:
            started_s = time.perf_counter()
            fn()
            seconds[fn].append(time.perf_counter() - started_s)
    return tuple(statistics.median(values) for values in seconds.values())


def main() -> None:
    rows = []
    for backend in ("gloo", "shm"):
        for world_size, numel in CASES:
            with Ranks(world_size, backend=backend) as ranks:
                raw_s, metered_s, recorded_s = ranks.run(measure, numel)[0]
            rows.append(
                {
                    "backend": backend,
                    "ranks": world_size,
                    "nbytes": 4 * numel,
                    "inner_us": 1e6 * raw_s,
                    "metered_us": 1e6 * metered_s,
                    "recorded_us": 1e6 * recorded_s,
                    "overhead_us": 1e6 * (recorded_s - raw_s),
                }
            )
    print(table(rows))
    write_results("meter", rows)


if __name__ == "__main__":
    main()
