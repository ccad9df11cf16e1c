"""Models that are too large for one rank: built without memory, filled one unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from pdt.comm.replicate import broadcast
from pdt.zero.unit import KEY, Unit
from pdt.zero.zero3 import units_of


def materialize(
    module: nn.Module,
    device: torch.device | str,
    init: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Give a module that was built on the meta device its memory on `device`, and values.

    Build it with `torch.device("meta")`, call `fully_shard` as ever, then this, on all ranks, then
    build the optimizer. Afterwards each rank holds its shards of rank 0's values, as if it had been
    built whole; but no more than one unit is whole at any time. `init(part)` sets the parameters
    and buffers that are the part's own, by default `part.reset_parameters()`; it is called for
    every part that has some, the parts of a unit in the order of `modules()`.
    """
    device = torch.device(device)
    for unit in units_of(module):
        _fill(unit, device, init or _reset_parameters)
    return module


@torch.no_grad()
def _fill(unit: Unit, device: torch.device, init: Callable[[nn.Module], object]) -> None:
    holder = object()
    for flat in unit.flats:
        if flat.shard.device.type == "meta":
            flat.to(device)
    for owner in unit.owners:
        owner.passes.hold(owner, holder)
    for part in parts_of(unit):
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                part._buffers[name] = torch.empty_like(buffer, device=device)
        if part._parameters or part._buffers:
            init(part)
    for owner in unit.owners:
        params = [param for flat in owner.flats for param in flat.params]
        broadcast(params, owner.passes.group)
        owner.keep_own()
        owner.passes.let_go(owner, holder)
    buffers = [b for part in parts_of(unit) for b in part._buffers.values() if b is not None]
    broadcast(buffers, unit.passes.group)


def parts_of(unit: Unit) -> Iterator[nn.Module]:
    """The modules of a unit that are in no other."""
    yield unit.module
    waiting = list(unit.module.children())
    while waiting:
        part = waiting.pop(0)
        if KEY not in part.__dict__:
            yield part
            waiting = [*part.children(), *waiting]


def _reset_parameters(part: nn.Module) -> None:
    reset = getattr(part, "reset_parameters", None)
    if reset is None:
        raise ValueError(
            f"{type(part).__name__} has no reset_parameters(): pass init, which sets its parameters"
            " and buffers"
        )
    reset()
