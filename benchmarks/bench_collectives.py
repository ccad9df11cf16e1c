"""`pdt.comm.collectives` beside gloo's own collectives, over the same gloo transport.

Times are medians of interleaved calls, each as slow as its slowest rank. The second table says why:
page faults of a rank (fresh memory: 256 per MiB), processor time of all its threads, and bytes that
crossed the loopback device per payload byte and rank (of this machine: keep it quiet).

    python benchmarks/bench_collectives.py [--quick]
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _common import table, write_results

from pdt import Ranks
from pdt.comm import collectives

KIB, MIB = 2**10, 2**20
SIZES = [KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB]
LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")


def candidates(nbytes: int, check: bool) -> dict[str, dict[str, Callable[[], Any]]]:
    """For each operation the calls to compare, on float32 payloads of `nbytes`."""
    _, n = collectives.place()
    whole = torch.ones(nbytes // 4 // n * n)
    part, result, summed = whole[: len(whole) // n].clone(), whole.clone(), torch.zeros_like(whole)
    gloo_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gloo_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    ours = collectives
    return {
        "all_gather": {
            "gloo": lambda: gloo_gather(result, part),
            "direct": lambda: ours.all_gather(result, part, check=check),
            "ring": lambda: ours.ring_all_gather(result, part, check=check),
        },
        "reduce_scatter": {
            "gloo": lambda: gloo_scatter(part, whole),
            "direct": lambda: ours.reduce_scatter(part, whole, check=check),
            "ring": lambda: ours.ring_reduce_scatter(part, whole, check=check),
        },
        "all_reduce": {
            "gloo": lambda: dist.all_reduce(summed),
            "direct": lambda: ours.all_reduce(summed, check=check),
            "ring": lambda: ours.ring_all_reduce(summed, check=check),
        },
    }


def sample(call: Callable[[], Any]) -> dict[str, float]:
    """One call's seconds, page faults, processor seconds, and bytes over the loopback device."""
    dist.barrier()
    lo, usage, start = _loopback(), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call()
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    dist.barrier()
    cpu_s = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    faults = after.ru_minflt - usage.ru_minflt
    return {"s": seconds, "faults": faults, "cpu_s": cpu_s, "lo": _loopback() - lo}


def _loopback() -> int:
    return int(LOOPBACK.read_text()) if LOOPBACK.exists() else 0


def measured(nbytes: int, repeats: int, check: bool) -> dict[tuple[str, str], list[Any]]:
    """Samples of this rank by (operation, version), taken in turns after one warm-up turn."""
    calls = {
        (operation, version): call
        for operation, versions in candidates(nbytes, check).items()
        for version, call in versions.items()
    }
    samples: dict[tuple[str, str], list[Any]] = {key: [] for key in calls}
    for turn in range(repeats + 1):
        for key, call in calls.items():
            taken = sample(call)
            if turn > 0:
                samples[key].append(taken)
    return samples


def rows_of(n: int, nbytes: int, by_rank: list[dict]) -> list[dict[str, Any]]:
    """One row for each operation and version: medians, and the speed relative to gloo's."""
    rows = []
    for operation, version in by_rank[0]:
        turns = list(zip(*(samples[operation, version] for samples in by_rank), strict=True))
        rows.append(
            {
                "ranks": n,
                "KiB": nbytes // KIB,
                "operation": operation,
                "version": version,
                "ms": 1e3 * median(max(s["s"] for s in turn) for turn in turns),
                "faults": median(turn[0]["faults"] for turn in turns),
                "cpu_ms": 1e3 * median(turn[0]["cpu_s"] for turn in turns),
                "lo/payload": median(turn[0]["lo"] for turn in turns) / nbytes / n,
            }
        )
    gloo_ms = {row["operation"]: row["ms"] for row in rows if row["version"] == "gloo"}
    return [row | {"speed": gloo_ms[row["operation"]] / row["ms"]} for row in rows]


def speeds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each payload: times of all versions and the direct version's speed."""
    lines: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        line = {key: row[key] for key in ("operation", "ranks", "KiB")}
        line = lines.setdefault(tuple(line.values()), line)
        line[f"{row['version']} ms"] = row["ms"]
        if row["version"] != "gloo":
            line[f"{row['version']} x"] = row["speed"]
    return sorted(lines.values(), key=lambda line: (line["operation"], line["ranks"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5 turns in place of 15")
    parser.add_argument("--no-check", action="store_true", help="call ours with check=False")
    args = parser.parse_args()
    repeats, check = 5 if args.quick else 15, not args.no_check
    rows = []
    for n in (2, 4):
        with Ranks(n, backend="gloo", timeout_s=600) as ranks:
            for nbytes in SIZES:
                by_rank = ranks.run(measured, nbytes, repeats, check)
                rows += rows_of(n, nbytes, by_rank)
    print(table(speeds(rows), floatfmt=".3g"))
    largest = [row for row in rows if row["KiB"] * KIB == SIZES[-1]]
    print(f"\nWhy, at {SIZES[-1] // MIB} MiB:\n{table(largest, floatfmt='.3g')}")
    name = "collectives" if check else "collectives_unchecked"
    print(f"\n{write_results(name, rows, repeats=repeats, check=check)}")


if __name__ == "__main__":
    main()
