"""Trains the small GPT on English text: in one process, or on many ranks under torchrun.

python examples/train.py
torchrun --standalone --nproc-per-node 2 examples/train.py --strategy ddp --comm-hook bf16
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from options import (
    World,
    check,
    fail,
    optimizer_options,
    parse,
    world_from_environment,
    wrap_options,
)
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

from pdt.comm import Link, init
from pdt.model import GPT, PRESETS, TextData
from pdt.offload.selective import recompute_blocks
from pdt.strategies import STRATEGIES


@dataclass
class Row:
    """One step of the loss curve, the same on every rank; None where it was not measured."""

    step: int
    train_loss: float
    validation_loss: float | None = None
    tokens_per_s: float | None = None


def load_data(args: argparse.Namespace) -> TextData:
    """The text of this run, or one line that says what is wrong with it."""
    try:
        text = args.text.read_text(encoding="utf-8") if args.text else None
        return TextData(PRESETS[args.preset].block_size, text, seed=args.seed)
    except (OSError, RuntimeError, ValueError) as error:
        fail(f"--text {args.text or 'not given'}: {error}")


def connect(args: argparse.Namespace, world: World) -> None:
    """Joins the process group, unless this process trains alone."""
    if world.backend == "nccl":
        torch.cuda.set_device(world.device)
    if args.strategy == "single":
        return
    try:
        link = None
        if args.link_bandwidth is not None:
            link = Link(args.link_latency or 0.0, args.link_bandwidth)
        init(world.backend, link=link)
    except ValueError as error:
        fail(str(error))


@torch.no_grad()
def validate(model: nn.Module, data: TextData, world: World, batch_size: int) -> float:
    """The mean loss over the validation split, each token counted once; the same on every rank."""
    model.eval()
    loss_and_count = torch.zeros(2, dtype=torch.float64, device=world.device)
    for tokens, targets in data.validation_batches(world.rank, world.world_size, batch_size):
        logits = model(tokens.to(world.device)).flatten(0, 1).double()
        targets = targets.to(world.device).flatten()
        loss_and_count[0] += F.cross_entropy(logits, targets, reduction="sum")
        loss_and_count[1] += (targets != -100).sum()
    model.train()
    loss, count = world.sum(loss_and_count).tolist()
    return loss / count


def train(args: argparse.Namespace, data: TextData, world: World) -> list[Row]:
    """Trains by the chosen strategy and returns the loss curve."""
    with optimizer_options(args) as options:
        return run(args, data, world, options)


def run(
    args: argparse.Namespace, data: TextData, world: World, options: dict[str, Any]
) -> list[Row]:
    """As `train`, with these arguments for the optimizer."""
    from tqdm import tqdm

    strategy = STRATEGIES[args.strategy]
    gpt = GPT(PRESETS[args.preset], seed=args.seed)
    gpt = recompute_blocks(gpt.to(world.device, getattr(torch, args.dtype)), args.recompute)
    try:
        model = strategy.wrap(gpt, **wrap_options(args))
    except ValueError as error:
        fail(str(error))
    optimizer = strategy.optimizer(model.parameters(), lr=args.lr, **options)
    rows: list[Row] = []
    losses: list[Tensor] = []
    start_s = time.perf_counter()
    for step in (bar := tqdm(range(1, args.steps + 1), unit="step", disable=world.rank != 0)):
        batch = data.batch(step - 1, world.rank, world.world_size, args.batch_size)
        tokens, targets = (part.to(world.device) for part in batch)
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        strategy.after_backward(model)
        optimizer.step()
        losses.append(loss.detach())
        if step % args.eval_every == 0 or step == args.steps:  # losses wait on the device
            means = (world.sum(torch.stack(losses)) / world.world_size).tolist()
            tokens_per_s = len(losses) * args.batch_size * data.block_size
            tokens_per_s /= time.perf_counter() - start_s
            rows += [Row(len(rows) + i, mean) for i, mean in enumerate(means, start=1)]
            rows[-1].tokens_per_s = tokens_per_s
            rows[-1].validation_loss = validate(model, data, world, args.batch_size)
            bar.set_postfix(loss=means[-1], validation=rows[-1].validation_loss)
            losses.clear()
            start_s = time.perf_counter()
    return rows


def save(rows: list[Row], title: str, out: Path) -> None:
    """Writes the loss curve as `loss.csv` and `loss.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with (out / "loss.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(vars(rows[0])))
        writer.writeheader()
        writer.writerows(vars(row) for row in rows)
    validated = [(r.step, r.validation_loss) for r in rows if r.validation_loss is not None]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([r.step for r in rows], [r.train_loss for r in rows], label="training")
    axes.plot(*zip(*validated, strict=True), "o--k", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.legend(frameon=False)
    figure.savefig(out / "loss.png", dpi=120)


def main(argv: list[str] | None = None) -> None:
    args = parse(STRATEGIES, argv)
    world = world_from_environment(args.backend)
    check(args, world)
    data = load_data(args)
    connect(args, world)
    rows = train(args, data, world)
    if dist.is_initialized():
        dist.destroy_process_group()
    if world.rank == 0:
        ranks = "1 rank" if world.world_size == 1 else f"{world.world_size} ranks"
        title = f"{args.strategy} on {ranks} ({world.device.type}), {len(rows)} steps"
        save(rows, title, args.out)
        print(
            f"{title}: loss {rows[-1].train_loss:.3f}, validation {rows[-1].validation_loss:.3f}, "
            f"{rows[-1].tokens_per_s:,.0f} tokens/s; curve in {args.out}"
        )


if __name__ == "__main__":
    try:
        record(main)()  # torchrun's closing report then shows the first failed rank's traceback
    except KeyboardInterrupt:
        sys.exit(130)
