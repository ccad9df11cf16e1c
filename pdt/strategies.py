"""How ranks share the training of one model: what each strategy changes in the loop.

The tour and `examples/train.py` run the same loop with every strategy of this table; each lesson
that builds a technique adds its entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from pdt.comm.cost import wire_nbytes
from pdt.ddp import DDP
from pdt.ddp.shared import SharedOptimizer, SharedParameters
from pdt.ddp.shared_memory import slice_cuts
from pdt.flat import offsets


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
    `held_nbytes(model, n)` is what a rank holds after a step, by kind, and
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
}
