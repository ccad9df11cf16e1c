"""Stage 3: a rank holds one shard of the parameters, and gathers a unit just before its use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pdt.comm.norm import clip_over_ranks
from pdt.comm.replicate import broadcast, check_same, describe_tensor
from pdt.zero.checks import check_own_memory
from pdt.zero.flat_params import FlatParams
from pdt.zero.module_hooks import Entry
from pdt.zero.passes import Passes
from pdt.zero.unit import KEY, Unit


def fully_shard(
    module: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    reshard_after_forward: bool = True,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    resident_numel: int = 0,
) -> nn.Module:
    """Make `module` one unit, whose parameters are whole only while it runs; returns the module.

    As torch's: call it for the parts first, then for the module that holds them, the root. A unit
    takes the parameters that no part has taken. Each rank keeps 1/n of them, from rank 0's values;
    a unit's are gathered when its forward begins, freed when it ends, gathered again when its
    backward begins, and freed when that ends, while its gradients are reduced to their owners. The
    root's own stay from its forward to its backward, and so do any unit's with
    `reshard_after_forward=False`. A step sends 3(n-1)/n of the parameters' bytes, 2(n-1)/n for
    those that stay, and a few bytes by which the ranks agree on what was used.

    The objects in `module.parameters()` stay the same for ever. Outside of a pass they are 1-D
    pieces of this rank's shard, as their gradients, so any elementwise optimizer, built at any
    time, steps them. `param_dtype` is what is gathered and computed with, and what floating-point
    inputs are cast to, while the optimizer steps shards in the parameters' own dtype;
    `reduce_dtype` (default: `param_dtype`) is what gradients are summed in. Parameters of at most
    `resident_numel` elements are not sharded: each rank holds them, and all of them, of all units,
    are reduced by one all-reduce.

    Raises ValueError, the same on every rank, when the ranks' modules differ.

    Rajbhandari et al. 2020, section 5.3 (arXiv:1910.02054); torch/distributed/fsdp/_fully_shard.
    """
    named = _checked_params(module, group)
    flats = [
        FlatParams(part, group, param_dtype, reduce_dtype, resident=is_small)
        for is_small in (False, True)
        for part in _by_kind(named, is_small, resident_numel).values()
    ]
    for flat in flats:
        if flat.shard.device.type != "meta":
            broadcast(flat.params, group)
        flat.cut()
    unit = Unit(module, flats, _borrowed(module))
    for _, param in named:
        param.__dict__[KEY] = unit
    unit.reshard_after_forward = reshard_after_forward
    module.__dict__[KEY] = unit
    entry = Entry(unit, param_dtype)
    entry.attach(module)
    module.__dict__[KEY + "_entry"] = entry
    _join(module, group)
    return module


def _checked_params(
    module: nn.Module, group: dist.ProcessGroup | None
) -> list[tuple[str, nn.Parameter]]:
    """What the unit takes, the same on every rank."""
    if KEY in module.__dict__:
        raise ValueError("the module is sharded already: call fully_shard once for each module")
    named = _own_params(module)
    device = next((p.device for _, p in named), torch.device("cpu"))
    lines = [describe_tensor("parameter", name, param) for name, param in named]
    lines += [describe_tensor("buffer", name, buffer) for name, buffer in module.named_buffers()]
    check_same(lines, group, _talks_on(device, group))
    real = {name: p for name, p in named if p.device.type != "meta"}
    check_own_memory([{"params": list(real.values()), "param_names": list(real)}])
    return named


def units_of(module: nn.Module) -> list[Unit]:
    """Those of the module and of all that it holds; ValueError when there is none."""
    units = [m.__dict__[KEY] for m in module.modules() if KEY in m.__dict__]
    if not units:
        raise ValueError("the module is not sharded: call fully_shard for it first")
    return units


def _talks_on(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """Where the ranks can tell each other something, also of a model without memory."""
    if device.type != "meta":
        return device
    return torch.device("cuda" if dist.get_backend(group).endswith("nccl") else "cpu")


def _own_params(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Those that no unit has taken."""
    named = [(name, p) for name, p in module.named_parameters() if KEY not in p.__dict__]
    for name, param in named:
        if is_lazy(param):
            raise ValueError(f"parameter {name!r} has no shape yet: run one forward, then shard")
    return named


Kind = tuple[torch.dtype, torch.device, bool]


def _by_kind(
    named: Sequence[tuple[str, nn.Parameter]], are_small: bool, resident_numel: int
) -> dict[Kind, list[tuple[str, nn.Parameter]]]:
    kinds: dict[Kind, list[tuple[str, nn.Parameter]]] = {}
    for name, param in named:
        if (param.numel() <= resident_numel) == are_small:
            kind = param.dtype, param.device, param.requires_grad
            kinds.setdefault(kind, []).append((name, param))
    return kinds


def _borrowed(module: nn.Module) -> list[Unit]:
    """The units that hold a parameter which this module uses outside of other units."""
    found: dict[int, Unit] = {}
    waiting = [module]
    while waiting:
        part = waiting.pop()
        for name, param in part._parameters.items():
            if param is not None and KEY in param.__dict__:
                unit: Unit = param.__dict__[KEY]
                if any(part is inner for inner in unit.module.modules()):
                    raise ValueError(
                        f"{name!r} is sharded already, with the module that holds this one: call "
                        "fully_shard for the parts first, then for what holds them"
                    )
                found[id(unit)] = unit
        waiting += [child for child in part.children() if KEY not in child.__dict__]
    return list(found.values())


def _join(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """From now on the units pass under this root."""
    names = {id(m): name for name, m in module.named_modules()}
    units = units_of(module)
    for flat in (flat for unit in units for flat in unit.flats):
        if flat.group is not group:
            raise ValueError(
                f"{flat.names[0]} is sharded over another group: pass the same to all calls"
            )
    passes = Passes(units, group)
    for index, unit in enumerate(units):
        unit.index, unit.passes = index, passes
        unit.name = names[id(unit.module)] or "the root"


def _roots_of(module: nn.Module) -> list[Passes]:
    """Several, if the module itself is not sharded."""
    return list(dict.fromkeys(unit.passes for unit in units_of(module)))


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backwards in this block add up on this rank alone, whole, in `reduce_dtype`.

    The next backward outside takes the sums along. What counts is where the backward stands, and
    it counts for all units under the module's root.
    """
    roots = _roots_of(module)
    before = [passes.sync for passes in roots]
    for passes in roots:
        passes.sync = False
    try:
        yield
    finally:
        for passes, sync in zip(roots, before, strict=True):
            passes.sync = sync


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """As torch's, of the whole gradient: every rank gets its norm, and scales its pieces alike.

    Of all units under the module's root. ValueError for a parameter that is in none.
    """
    for name, param in module.named_parameters():
        if KEY not in param.__dict__ and param.requires_grad:
            raise ValueError(f"{name} is in no unit, so it counts on no rank: fully_shard(module)")
    roots = _roots_of(module)
    flats = [flat for passes in roots for flat in passes.flats]
    shards = [p.grad for f in flats if not f.resident for p in f.params if p.grad is not None]
    whole = [p.grad for f in flats if f.resident for p in f.params if p.grad is not None]
    device = flats[0].shard.device if flats else torch.device("cpu")
    return clip_over_ranks(
        shards,
        max_norm,
        norm_type,
        roots[0].group,
        device=device,
        whole=whole,
        error_if_nonfinite=error_if_nonfinite,
    )


@contextmanager
def gathered(module: nn.Module, *, writeback: bool = False) -> Iterator[None]:
    """In this block the parameters of all units in `module` are whole. All ranks must enter it.

    With `writeback` each rank keeps, of what was written to them, what lies in its own shard: so
    all ranks should write the same. Otherwise changes are lost.
    """
    units, holder = units_of(module), object()
    owners = list(dict.fromkeys(owner for unit in units for owner in unit.owners))
    for owner in owners:
        owner.passes.hold(owner, holder)
    try:
        yield
        if writeback:
            for owner in owners:
                owner.keep_own()
    finally:
        for owner in owners:
            owner.passes.let_go(owner, holder)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let the module be entered by this method as by `forward`: its parameters are whole in it."""
    if KEY not in module.__dict__:
        raise ValueError("the module is not sharded: call fully_shard for it first")
    entry: Entry = module.__dict__[KEY + "_entry"]
    setattr(module, name, entry.wrap(getattr(module, name)))


def set_prefetch(module: nn.Module, units: int) -> None:
    """How many units are gathered ahead of the one that is used, in all units under the root."""
    if units < 0:
        raise ValueError(f"units={units} must be 0 or more")
    for passes in _roots_of(module):
        passes.calls.prefetch = units
