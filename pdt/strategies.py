"""How ranks share the training of one model: what each strategy changes in the loop.

The tour and `examples/train.py` run the same loop with every strategy of this table; each lesson
that builds a technique adds its entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from pdt.buckets import assign_buckets
from pdt.comm.cost import wire_nbytes
from pdt.ddp import DDP
from pdt.ddp.shared import SharedOptimizer, SharedParameters
from pdt.ddp.shared_memory import slice_cuts
from pdt.flat import ShardLayout, offsets
from pdt.offload import OffloadedAdamW, TensorFiles, bus_of
from pdt.zero import Zero1, Zero2, fully_shard
from pdt.zero.calls import DIGEST_BITS
from pdt.zero.update import short


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that get a gradient; a tied one once."""
    return [param for param in model.parameters() if param.requires_grad]


def replicated_nbytes(model: nn.Module, n: int) -> dict[str, int]:
    """Every rank holds all: the parameters, as many gradients, and AdamW's two states and steps."""
    params = trained(model)
    nbytes = sum(p.nbytes for p in params)
    states = 2 * nbytes + 4 * len(params)  # a step count of four bytes per parameter
    return {"parameters": nbytes, "gradients": nbytes, "optimizer states": states}


@dataclass(frozen=True)
class Strategy:
    """`wrap` takes the model before training, `optimizer` makes the optimizer, `after_backward`
    runs between `loss.backward()` and `optimizer.step()`. The formulas, for n ranks:
    `held_nbytes(model, n)` is what a rank's device holds after a step, by kind, and
    `step_wire_nbytes(model, n)` is what it sends in one, from the second on. Of the kinds in
    `one_copy` the ranks hold one together, in shared memory: a rank's part is 1/n."""

    wrap: Callable[..., nn.Module] = lambda model: model
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    after_backward: Callable[[nn.Module], None] = lambda model: None
    held_nbytes: Callable[[nn.Module, int], dict[str, int]] = replicated_nbytes
    step_wire_nbytes: Callable[[nn.Module, int], float] = lambda model, n: 0.0
    one_copy: tuple[str, ...] = ()
    distributed: bool = True


def broadcast_parameters(model: nn.Module) -> nn.Module:
    """Every rank holds rank 0's parameters and buffers afterwards."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    return model


def average_gradients(model: nn.Module) -> None:
    """Every rank holds the mean of all ranks' gradients afterwards: one all-reduce per parameter.

    A rank without a gradient counts as zero; where no rank has one it stays None, so that weight
    decay leaves the parameter alone. The ranks agree on this by one small all-reduce before.
    """
    params = trained(model)
    if not params:
        return
    has_grad = torch.tensor([p.grad is not None for p in params], device=params[0].device).int()
    dist.all_reduce(has_grad)
    for param, count in zip(params, has_grad.tolist(), strict=True):
        if count:
            grad = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
            grad /= dist.get_world_size()  # before the sum, which could overflow
            dist.all_reduce(grad)
            param.grad = grad


def _naive_wire_nbytes(model: nn.Module, n: int) -> float:
    """2(n-1)/n of the gradients, and of the four bytes a parameter by which the ranks agree."""
    nbytes = sum(p.nbytes + 4 for p in trained(model))
    return wire_nbytes("all_reduce", nbytes, n)


def shared_nbytes(model: nn.Module, n: int) -> dict[str, int]:
    """A rank's part, the first one's, of what n ranks of one machine hold once: parameters,
    gradients, and AdamW's states of the elements that it owns."""
    params = trained(model)
    held = replicated_nbytes(model, n)
    numels = [p.numel() for p in params]
    own = slice_cuts(numels, n)[1]
    pieces = sum(start < own for start in offsets(numels)[:-1])  # each with a step count
    states = 2 * own * params[0].element_size() + 4 * pieces
    return {
        "parameters": held["parameters"] // n,
        "gradients": held["gradients"] // n,
        "optimizer states": states,
    }


def _ddp_wire_nbytes(model: nn.Module, n: int) -> float:
    """2(n-1)/n of the gradients, however many buckets they travel in."""
    nbytes = sum(p.nbytes for p in trained(model))
    return wire_nbytes("all_reduce", nbytes, n)


def shard_units(model: nn.Module) -> nn.Module:
    """Stage 3: each block is a unit, and the rest of the model."""
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    return fully_shard(model)


def _layouts(model: nn.Module, n: int, *, stage: int) -> list[ShardLayout]:
    """Of what is reduced and gathered together: buckets, or in stage 3 units, the root last."""
    params = trained(model)
    if stage < 3:
        plan = assign_buckets(params, bucket_cap_mb=25.0, first_bucket_mb=25.0)
        together = [[params[i] for i in bucket.params] for bucket in plan]
    else:
        together = [trained(block) for block in model.get_submodule("blocks").children()]
        in_blocks = {id(param) for block in together for param in block}
        together.append([param for param in params if id(param) not in in_blocks])
    return [ShardLayout(tuple(p.numel() for p in part), n) for part in together]


def sharded_nbytes(model: nn.Module, n: int, *, stage: int) -> dict[str, int]:
    """What rank 0 holds of a model in fp32: 1/n of the states, from stage 2 on of the gradients
    too, in stage 3 of all, as buffers that are padded to n equal shards. AdamW counts its steps by
    flat tensor, or in stage 3 by parameter."""
    params, layouts = trained(model), _layouts(model, n, stage=stage)
    shard = 4 * sum(layout.shard_numel for layout in layouts)
    own = 4 * sum(piece.numel for layout in layouts for piece in layout.pieces(0))
    flat_tensors = sum(len(short(layout.pieces(0))) for layout in layouts)
    return {
        "parameters": shard if stage == 3 else n * shard,
        "gradients": sum(param.nbytes for param in params) if stage == 1 else shard,
        "optimizer states": 2 * own + 4 * (len(params) if stage == 3 else flat_tensors),
    }


def _zero_wire_nbytes(model: nn.Module, n: int, *, stage: int) -> float:
    """(n-1)/n of the gradients, and of the parameters each time that they are gathered: once, in
    stage 3 twice but for the root's own; and flags of a byte by which the ranks agree."""
    nbytes = [4 * layout.padded_numel for layout in _layouts(model, n, stage=stage)]
    gathered = sum(nbytes) + (sum(nbytes[:-1]) if stage == 3 else 0)
    flags = len(trained(model)) * (2 if stage == 2 else 1)
    if stage == 3:
        flags += len(nbytes) + 2 * DIGEST_BITS
    sent = wire_nbytes("reduce_scatter", sum(nbytes), n) + wire_nbytes("all_gather", gathered, n)
    return sent + wire_nbytes("all_reduce", flags, n)


def _zero(
    stage: int,
    wrap: Callable[..., nn.Module] = lambda model: model,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Strategy:
    return Strategy(
        wrap=wrap,
        optimizer=optimizer,
        held_nbytes=partial(sharded_nbytes, stage=stage),
        step_wire_nbytes=partial(_zero_wire_nbytes, stage=stage),
    )


def _offloaded(
    params: Iterable[nn.Parameter], *, lr: float, files: TensorFiles | None = None
) -> torch.optim.Optimizer:
    """Stage 2, whose shards are stepped on the host: ZeRO-Offload's form for several devices."""
    params = list(params)
    bus = bus_of(params[0].device)
    return Zero2(params, OffloadedAdamW, bus=bus, files=files, lr=lr)


def _offloaded_nbytes(model: nn.Module, n: int) -> dict[str, int]:
    """As stage 2, without the states."""
    return sharded_nbytes(model, n, stage=2) | {"optimizer states": 0}


STRATEGIES = {
    "single": Strategy(distributed=False),
    "naive": Strategy(
        wrap=broadcast_parameters,
        after_backward=average_gradients,
        step_wire_nbytes=_naive_wire_nbytes,
    ),
    "ddp": Strategy(wrap=DDP, step_wire_nbytes=_ddp_wire_nbytes),
    "shared": Strategy(
        wrap=SharedParameters,
        optimizer=SharedOptimizer,
        held_nbytes=shared_nbytes,
        one_copy=("parameters", "gradients"),
    ),
    "zero1": _zero(1, optimizer=partial(Zero1, optimizer_class=torch.optim.AdamW)),
    "zero2": _zero(2, optimizer=partial(Zero2, optimizer_class=torch.optim.AdamW)),
    "zero3": _zero(3, wrap=shard_units),
    "offload": Strategy(
        optimizer=_offloaded,
        held_nbytes=_offloaded_nbytes,
        step_wire_nbytes=partial(_zero_wire_nbytes, stage=2),
    ),
}
