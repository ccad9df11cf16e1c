"""Lesson 07's exercise on parameters of which all ranks hold one copy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdt.grade.dice import Dice
from pdt.grade.exercise import Exercise, Property, Run, Trial
from pdt.grade.expect import expect, expect_int, expect_tensor

SMAPS = Path("/proc/self/smaps")


def _module(kind: str, width: int, rank: int) -> nn.Module:
    """Another model on each rank, of odd sizes."""
    torch.manual_seed(1000 + rank)
    module = nn.Sequential(nn.Linear(width, width + 1), nn.Linear(width + 1, width))
    if kind == "tied":
        module.append(nn.Linear(width + 1, width, bias=False))
        module[2].weight = module[1].weight
    elif kind == "frozen":
        module[0].requires_grad_(False)
    elif kind == "a number":
        module.register_parameter("scale", nn.Parameter(torch.tensor(0.5)))
    return module


def _share_trials(dice: Dice) -> Iterator[Trial]:
    for n in (1, 2, 3, 4):
        for kind in ("tied", "frozen", "a number"):
            width = dice.integer(5, 40)
            yield Trial([(kind, width)] * n, f"{kind}, width {width}")
    width = dice.integer(700, 800)
    yield Trial([("tied", width)] * 3, f"large, width {width}")


def _mapping(address: int) -> tuple[str, int, int]:
    """The name, resident and proportional kB of what is mapped at this address; Linux."""
    name, sizes, inside = "", {"Rss": 0, "Pss": 0}, False
    for line in SMAPS.read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and ":" not in first:
            low, high = (int(end, 16) for end in first.split("-"))
            if inside:
                break
            inside = low <= address < high
            name = rest.split(maxsplit=4)[4] if inside and len(rest.split()) > 4 else name
        elif inside and first.rstrip(":") in sizes:
            sizes[first.rstrip(":")] = int(rest.split()[0])
    return name, sizes["Rss"], sizes["Pss"]


def _share(share_parameters: Callable[..., Any], kind: str, width: int) -> dict[str, Any]:
    """Share a model, look, write on one rank, look again."""
    rank, n = dist.get_rank(), dist.get_world_size()
    module = _module(kind, width, rank)
    before = [(id(p), p.requires_grad) for p in module.parameters()]
    flat = share_parameters(module)
    params = list(module.parameters())
    seen: dict[str, Any] = {
        "same": [(id(p), p.requires_grad) for p in params] == before,
        "values": [p.detach().clone() for p in params],
        "places": [p.data_ptr() - flat.data_ptr() for p in params],
        "numel": flat.numel(),
    }
    dist.barrier()
    if rank == n - 1:
        params[0].data.fill_(42)
    dist.barrier()
    seen["first"] = params[0].detach().clone()
    seen["mapping"] = _mapping(flat.data_ptr()) if SMAPS.exists() else None
    dist.barrier()
    return seen


def _rank_0s(run: Run) -> list[Tensor]:
    kind, width = run.inputs[0]
    return [p.detach() for p in _module(kind, width, 0).parameters()]


def _holds_rank_0s(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        for i, (value, wanted) in enumerate(zip(seen.result["values"], _rank_0s(run), strict=True)):
            expect_tensor(value, wanted, f"parameter {i} of rank {rank}")


def _sees_writes(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        wanted = torch.full_like(_rank_0s(run)[0], 42)
        expect_tensor(seen.result["first"], wanted, f"what rank {rank} sees of another's write")


def _keeps_parameters(run: Run) -> None:
    for rank, seen in enumerate(run.ranks):
        same = seen.result["same"]
        expect(same, f"the same Parameter objects on rank {rank}, frozen as before", "others")


def _lies_end_to_end(run: Run) -> None:
    numels = [p.numel() for p in _rank_0s(run)]
    places = [4 * sum(numels[:i]) for i in range(len(numels))]
    for rank, seen in enumerate(run.ranks):
        expect_int(seen.result["numel"], sum(numels), f"elements of rank {rank}'s flat tensor")
        found = seen.result["places"]
        expect(found == places, f"parameters at bytes {places[:4]} of it", f"{found[:4]}")


def _is_one_copy(run: Run) -> None:
    """Proportional sizes of all ranks add up to one copy, and a page or a few for each rank."""
    mappings = [seen.result["mapping"] for seen in run.ranks]
    if None in mappings:
        return
    one_kb = 4 * max(seen.result["numel"] for seen in run.ranks) / 1024
    if one_kb > 1024:  # small ones hide in pages that hold other things, too
        held_kb = sum(pss for _, _, pss in mappings)
        expect(held_kb < 1.2 * one_kb, f"{one_kb:,.0f} kB on all ranks together", f"{held_kb:,} kB")


def _leaves_no_name(run: Run) -> None:
    for seen in run.ranks:
        name = (seen.result["mapping"] or ("", 0, 0))[0]
        nameless = not name.startswith("/") or "memfd:" in name or name.endswith("(deleted)")
        expect(nameless, "memory without a name in a file system", os.path.dirname(name) + "/...")


SHARE_PARAMETERS = Exercise(
    name="share_parameters",
    points=3,
    minutes=20,
    trials=_share_trials,
    drive=_share,
    poison=("pdt.ddp.shared.SharedParameters", "pdt.ddp.shared_memory.NodeMemory"),
    properties=(
        Property(
            "holds rank 0's values on every rank",
            _holds_rank_0s,
            "rank 0 alone copies its values in; the others wait until they are there.",
        ),
        Property(
            "every rank sees what one rank writes",
            _sees_writes,
            "p.data must be a view of the segment's memory, not a copy of it.",
        ),
        Property(
            "keeps the Parameter objects",
            _keeps_parameters,
            "set p.data: an optimizer, a tie or a frozen flag belongs to the Parameter itself.",
        ),
        Property(
            "lays each parameter once, end to end",
            _lies_end_to_end,
            "module.parameters() gives a tied one once; return the whole flat tensor.",
        ),
        Property(
            "is one copy for all ranks",
            _is_one_copy,
            "one rank makes the segment, all others open it by its path.",
        ),
        Property(
            "leaves no name in a file system",
            _leaves_no_name,
            "a name outlives a killed process: Segment.create makes memory without one.",
        ),
    ),
)
