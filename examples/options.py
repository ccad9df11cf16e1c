"""What train.py is asked to do, in which world of ranks, and whether that can be done here."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from pdt.ddp.compress import PowerSGD, TopK
from pdt.ddp.hooks import Hook, all_reduce_hook, bf16_hook, fp16_hook, fp32_sum_hook, noop_hook
from pdt.model import PRESETS
from pdt.offload import TensorFiles
from pdt.offload.selective import MODES

HOOKS: dict[str, Callable[[], Hook]] = {
    "none": lambda: all_reduce_hook,
    "noop": lambda: noop_hook,
    "bf16": lambda: bf16_hook,
    "fp16": lambda: fp16_hook,
    "fp32-sum": lambda: fp32_sum_hook,
    "topk": lambda: TopK(0.01),
    "powersgd": lambda: PowerSGD(4),
}


@dataclass(frozen=True)
class World:
    """Which rank this process is, by torchrun's variables, and the device it computes on."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    backend: str

    @property
    def device(self) -> torch.device:
        on_gpu = self.backend == "nccl"
        return torch.device("cuda", self.local_rank) if on_gpu else torch.device("cpu")

    def sum(self, values: Tensor) -> Tensor:
        """`values` summed over the ranks, in float64 and on CPU; every rank holds the sum."""
        total = values.to(self.device, torch.float64)
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.cpu()


def world_from_environment(backend: str) -> World:
    """The world that torchrun started, or a world of one process."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, world_size, local_rank, local_world_size = (
        int(os.environ.get(name, default)) for name, default in zip(names, "0101", strict=True)
    )
    if backend == "auto":
        backend = "nccl" if torch.cuda.device_count() >= local_world_size else "gloo"
    return World(rank, world_size, local_rank, local_world_size, backend)


def fail(message: str) -> NoReturn:
    """One line from the first rank of each machine, and exit code 2.

    torchrun ends the other ranks as soon as one has exited, so they let the first one speak.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)
    else:
        print(f"train.py: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        fail(message)


def parse(strategies: Iterable[str], argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with each flag's own errors reported."""
    parser = Parser(prog="train.py", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--strategy", choices=list(strategies), default="single", help="how ranks share the work")
    add("--preset", choices=list(PRESETS), default="small", help="size of the model")
    add("--steps", type=int, default=300, help="optimizer steps")
    add("--batch-size", type=int, default=16, help="samples per step, all ranks together")
    add("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    add("--seed", type=int, default=0, help="of the initial values and of the data's order")
    add("--dtype", choices=["float32", "float64", "bfloat16"], default="float32", help="of all")
    add("--comm-hook", choices=list(HOOKS), help="what the buckets of --strategy ddp send")
    add("--bucket-cap-mb", type=float, help="size of the buckets of --strategy ddp, in MiB")
    add("--recompute", choices=MODES, default="none", help="what backward computes once more")
    add("--states-folder", type=Path, help="of files for the states of --strategy offload")
    add("--eval-every", type=int, default=100, help="steps between two validations")
    add("--backend", choices=["auto", "gloo", "nccl"], default="auto", help="nccl: a GPU per rank")
    add("--link-latency", type=float, help="of an emulated link, in seconds")
    add("--link-bandwidth", type=float, help="of an emulated link, in bytes per second")
    add("--text", type=Path, help="a file to train on instead of Python's help topics")
    add("--out", type=Path, default=Path("runs"), help="folder for loss.csv and loss.png")
    return parser.parse_args(argv)


def check(args: argparse.Namespace, world: World) -> None:
    """End with one line if these arguments cannot be run in this world."""
    _check_numbers(args)
    _check_ranks(args, world)
    missing = [m for m in ("matplotlib", "tqdm") if importlib.util.find_spec(m) is None]
    if missing:
        fail(f"{' and '.join(missing)} not installed: pip install {' '.join(missing)}")
    if world.rank == 0:
        _check_writable("--out", args.out)
    if args.states_folder:
        _check_writable("--states-folder", args.states_folder)


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("steps", "batch_size", "eval_every"):
        if getattr(args, name) < 1:
            fail(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not 0 < args.lr < math.inf:
        fail(f"--lr must be positive and finite, got {args.lr}")
    if args.bucket_cap_mb is not None and not args.bucket_cap_mb >= 0:
        fail(f"--bucket-cap-mb must be 0 or more, got {args.bucket_cap_mb}")
    if args.link_latency is not None and args.link_bandwidth is None:
        fail(f"--link-latency {args.link_latency} needs --link-bandwidth, in bytes per second")


def wrap_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was said of DDP, as its keyword arguments."""
    said: dict[str, Any] = {}
    if args.comm_hook is not None:
        said["comm_hook"] = HOOKS[args.comm_hook]()
    if args.bucket_cap_mb is not None:
        said["bucket_cap_mb"] = args.bucket_cap_mb
    return said


@contextmanager
def optimizer_options(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What was said of the optimizer, as its keyword arguments; files are this rank's own."""
    if args.states_folder is None:
        yield {}
    else:
        with TensorFiles(args.states_folder) as files:
            yield {"files": files}


def _check_ranks(args: argparse.Namespace, world: World) -> None:
    ranks, gpus = world.local_world_size, torch.cuda.device_count()
    if args.strategy == "single":
        if world.world_size > 1:
            fail(f"--strategy single is one process, not {world.world_size}: use --strategy naive")
        if args.link_bandwidth is not None:
            fail("--link-bandwidth is for several ranks: --strategy single has no link")
    elif "RANK" not in os.environ:
        command = f"torchrun --standalone --nproc-per-node 2 train.py --strategy {args.strategy}"
        fail(f"--strategy {args.strategy} needs ranks, start them by: {command}")
    if wrap_options(args) and args.strategy != "ddp":
        fail(f"--comm-hook and --bucket-cap-mb are for --strategy ddp, not {args.strategy}")
    if args.states_folder and args.strategy != "offload":
        fail(f"--states-folder is for --strategy offload, not {args.strategy}")
    if args.batch_size % world.world_size:
        fail(f"--batch-size {args.batch_size} is not a multiple of the {world.world_size} ranks")
    if world.backend == "nccl" and gpus < ranks:
        fail(f"--backend nccl needs a GPU per rank, here {gpus} for {ranks}: use --backend gloo")


def _check_writable(flag: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        fail(f"{flag} {folder} cannot be written: {error.strerror}")
