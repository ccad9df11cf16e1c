"""A step of DDP as a picture: what each rank computed and sent, and how much of it was hidden.

    python benchmarks/bench_overlap.py [--ranks N] [--out FILE]

On GPUs where there are any: NCCL with a GPU for each rank, or ranks over gloo that share one; else
on the CPU over an emulated link. Writes benchmarks/results/overlap_DEVICE.png and .json. On NCCL
the transfers' spans are the host's moments, when it queued them: torch's profiler has the GPU's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, table, write_results

from pdt import Ranks
from pdt.comm import Link
from pdt.measure.timeline import Timeline

STEPS = 6


def step(name: str, width: int, rows: int) -> tuple[Timeline, str]:
    """In a rank: the timeline of the last step by this wrapper, and the kind of its device."""
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from pdt.comm import meter
    from pdt.ddp import DDP
    from pdt.measure import module_spans
    from pdt.ranks import device

    place = device(share_gpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]).to(place)
    caps = {"bucket_cap_mb": 4 * width * width / 2**20}
    if name == "pdt":
        ddp: nn.Module = DDP(model, first_bucket_mb=caps["bucket_cap_mb"], **caps)
    else:
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **caps)
    x = torch.randn(rows, width, device=place)
    for _ in range(STEPS):
        ddp.zero_grad()
        dist.barrier()
        with meter() as m, module_spans(model, rank=dist.get_rank()) as timeline:
            ddp(x).square().mean().backward()
            if place.type == "cuda":
                torch.cuda.synchronize(place)
    sent = Timeline.from_records(m.records, dist.get_rank())
    return Timeline.merge([timeline, sent]), place.type


def options(num_ranks: int | None) -> tuple[int, dict[str, Any]]:
    """How many ranks, and over what."""
    gpus = torch.cuda.device_count()
    world_size = num_ranks or max(gpus, 2)
    if gpus >= world_size:
        return world_size, {"backend": "nccl"}
    return world_size, {"backend": "gloo", "link": None if gpus else Link(2e-4, 2.5e8)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="2, or as many as there are GPUs")
    parser.add_argument("--out", type=Path, help="the picture")
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    world_size, how = options(args.ranks)
    width, rows = (4096, 2048) if torch.cuda.is_available() else (512, 256)
    figure, axes = plt.subplots(2, 1, figsize=(8, 2 + 1.2 * world_size), layout="constrained")
    found = []
    for name, ax in zip(("pdt", "torch"), axes, strict=True):
        with Ranks(world_size, timeout_s=120, **how) as ranks:
            timelines, kinds = zip(*ranks.run(step, name, width, rows), strict=True)
        timeline = Timeline.merge(list(timelines))
        timeline.plot(ax)
        ax.set_title(f"{name} on {world_size} ranks, {how['backend']}, {kinds[0]}", loc="right")
        exposed, busy = timeline.exposed(), timeline.busy("send")
        found += [
            {"wrapper": name, "rank": rank, "sent_s": busy[rank], "exposed_s": exposed[rank]}
            for rank in range(world_size)
        ]
    print(table(found))
    out = args.out or RESULTS / f"overlap_{kinds[0]}.png"
    figure.savefig(out, dpi=100)
    print(out, write_results(f"overlap_{kinds[0]}", found, backend=how["backend"]))


if __name__ == "__main__":
    main()
