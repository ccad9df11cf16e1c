"""The course in one minute: every strategy trains the small GPT on live ranks and is measured."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from pdt.comm import meter
from pdt.measure import Ledger
from pdt.measure.stats import median
from pdt.measure.table import text_table
from pdt.model import GPT, PRESETS, TextData
from pdt.ranks import Ranks
from pdt.strategies import STRATEGIES

RANKS = 2
STEPS = 7
BATCH = 8  # samples per step, all ranks together
LASTING = ("parameters", "gradients", "optimizer states")
AGREE = 1e-4  # float32 sums in another order; a wrong gradient shows in the second step


@dataclass(frozen=True)
class Report:
    """What one rank measured, and what the formulas say: live bytes by kind and the bytes sent in
    one step; the losses of all steps and the median time of one."""

    losses: list[float]
    held_nbytes: dict[str, int]
    held_formula: dict[str, int]
    wire_nbytes: float
    wire_formula: float
    step_s: float


def train(name: str) -> Report:
    """Train on this rank by the strategy `name`; the second step is measured (in the first DDP
    learns the order of its buckets), the later ones are timed."""
    strategy, preset = STRATEGIES[name], PRESETS["small"]
    rank, size = dist.get_rank(), dist.get_world_size()
    data = TextData(preset.block_size)
    plain, gpt = GPT(preset), GPT(preset)  # what the formulas look at, what is trained
    model = strategy.wrap(gpt)
    optimizer = strategy.optimizer(model.parameters(), lr=1e-3)
    losses, seconds = [], []

    def step(number: int) -> None:
        tokens, targets = data.batch(number, rank, size, BATCH)
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        strategy.after_backward(model)
        optimizer.step()
        losses.append(loss.detach())

    step(0)
    with meter() as metered, Ledger(model=gpt, optimizer=optimizer) as ledger:
        step(1)
    for number in range(2, STEPS):
        dist.barrier()
        started_s = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - started_s)
    means = torch.stack(losses) / size
    dist.all_reduce(means)
    live = ledger.live("device")
    return Report(
        means.tolist(),
        {kind: live[kind] // (size if kind in strategy.one_copy else 1) for kind in LASTING},
        strategy.held_nbytes(plain, size),
        metered.total().wire_nbytes,
        strategy.step_wire_nbytes(plain, size),
        median(seconds),
    )


def run() -> dict[str, Report]:
    """Rank 0's report of every strategy."""
    reports = {}
    for name, strategy in STRATEGIES.items():
        with Ranks(RANKS if strategy.distributed else 1, backend="gloo") as ranks:
            reports[name] = ranks.run(train, name)[0]
    return reports


def check(reports: Mapping[str, Report]) -> list[str]:
    """What does not hold: losses that differ from one process's, bytes that miss the formula."""
    wrong, reference = [], reports["single"].losses
    for name, report in reports.items():
        apart = max(abs(a - b) for a, b in zip(report.losses, reference, strict=True))
        if not apart <= AGREE:
            wrong.append(f"{name}: losses differ from single-process training by {apart:.1e}")
        if report.wire_nbytes != report.wire_formula:
            wrong.append(
                f"{name}: a rank sends {report.wire_nbytes:,.0f} bytes in a step, "
                f"the formula says {report.wire_formula:,.0f}"
            )
        if report.held_nbytes != report.held_formula:
            wrong.append(
                f"{name}: a rank holds {report.held_nbytes}, the formula says {report.held_formula}"
            )
    return wrong


def table(reports: Mapping[str, Report]) -> str:
    """One row per strategy; sizes are MB (1e6 bytes) on rank 0, after a step."""
    rows = []
    for name, report in reports.items():
        sizes = [f"{report.held_nbytes[kind] / 1e6:.2f}" for kind in LASTING]
        formula = f"{sum(report.held_formula.values()) / 1e6:.2f}"
        traffic = [f"{n / 1e6:.2f}" for n in (report.wire_nbytes, report.wire_formula)]
        ratio = f"{report.step_s / reports['single'].step_s:.2f}"
        ranks = RANKS if STRATEGIES[name].distributed else 1
        rows.append((name, ranks, *sizes, formula, *traffic, ratio, f"{report.losses[-1]:.3f}"))
    headers = (
        "strategy",
        "ranks",
        "parameters",
        "gradients",
        "states",
        "formula: all three",
        "sent",
        "formula",
    )
    return text_table((*headers, "step time", "loss"), rows)


def draw(reports: Mapping[str, Report], path: Path) -> None:
    """Two panels: what rank 0 holds by kind, and what it sends against the formula."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from pdt.measure import plot
    from pdt.measure.style import LOOKS, PAPER

    with plot.use_style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 0.6 * len(reports) + 1.9))
        plot.memory_bars(left, {name: report.held_nbytes for name, report in reports.items()})
        left.set_xlabel("MB that a rank holds after a step")
        for row, report in enumerate(reports.values()):
            right.barh(row, report.wire_nbytes / 1e6, 0.62, **LOOKS["all_reduce"].patch())
            right.plot([report.wire_formula / 1e6] * 2, [row - 0.4, row + 0.4], color=PAPER)
        right.set_yticks(range(len(reports)), list(reports))
        right.set_ylim(len(reports) - 0.5, -0.6)
        right.set_xlabel("MB that a rank sends in a step (line: the formula)")
        figure.savefig(path)
        plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """`python -m pdt tour`: 0 if every strategy agrees with single-process training."""
    parser = argparse.ArgumentParser(prog="python -m pdt tour", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/tour.png"), help="the picture")
    path: Path = parser.parse_args(argv).out
    preset = PRESETS["small"]
    print(
        f"Training a GPT of {preset.num_parameters():,} parameters for {STEPS} steps of {BATCH} "
        f"samples by {len(STRATEGIES)} strategies.\n"
    )
    reports = run()
    print(table(reports))
    print(
        "\nSizes and traffic in MB on rank 0; step time relative to one process on the same batch."
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(reports, path)
        print(f"Picture: {path}")
    except ImportError:
        print("No picture: matplotlib is not installed (pip install matplotlib)")
    except OSError as error:
        print(f"No picture: {path} cannot be written ({error.strerror}); choose another by --out")
    wrong = check(reports)
    print("\n".join(wrong) or f"All strategies agree: losses within {AGREE:g}, bytes to the byte.")
    return 1 if wrong else 0
