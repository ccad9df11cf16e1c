"""Loss scaling for fp16, where each rank sees the gradients of its shard alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdt.zero.zero1 import Zero1


class ShardedGradScaler(torch.amp.GradScaler):
    """torch's GradScaler, with one decision for all ranks: what is not finite on one is not on all.

    So all ranks skip a step together and hold the same scale; a rank whose shards are empty too.
    For `Zero1` and `Zero2`, whose gradients it reduces first, as `clip_grad_norm_` does, and for an
    optimizer whose parameters' `.grad` are this rank's shards. `group`: the ranks that decide; of a
    `Zero1` or `Zero2` it is theirs. All ranks must make the same calls.

    Used as torch's: `scale(loss).backward()`, `unscale_(optimizer)` if the gradients are clipped,
    `step(optimizer)`, `update()`. `options`: torch's `init_scale`, `growth_factor`,
    `backoff_factor`, `growth_interval`, `enabled`. Raises ValueError for fp16 gradients that would
    be unscaled in fp16: a `master_dtype` avoids it.
    """

    def __init__(
        self, device: str = "cuda", *, group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__(device, **options)
        self.group = group

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Where torch unscales, and looks for what is not finite."""
        group = self.group
        if isinstance(optimizer, Zero1):
            group = optimizer.group
            found = _unscale(optimizer.mean_grads(), inv_scale, found_inf, allow_fp16)
        else:
            by_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            found = list(by_device.values())
        for other in found:
            found_inf = torch.maximum(found_inf, other.to(found_inf.device))
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group)
        return {found_inf.device: found_inf}


def _unscale(
    grads: Iterable[Tensor], inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> list[Tensor]:
    found = []
    for grad in grads:
        if grad.dtype == torch.float16 and not allow_fp16:
            raise ValueError("gradients in fp16 cannot be unscaled: pass master_dtype to Zero1")
        found.append(torch.zeros_like(found_inf, device=grad.device))
        torch._amp_foreach_non_finite_check_and_unscale_(
            [grad], found[-1], inv_scale.to(grad.device)
        )
    return found
