"""Loss scaling where the gradients have left for the host."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pdt.offload.optimizer import OffloadedOptimizer


class OffloadedGradScaler(torch.amp.GradScaler):
    """torch's GradScaler for an `OffloadedOptimizer`: it looks at the gradients on the host.

    Nothing is written: the optimizer divides by the scale as it reads them. Used as torch's:
    `scale(loss).backward()`, `unscale_(optimizer)` before `optimizer.clip_grad_norm_`,
    `step(optimizer)`, `update()`. `over_ranks`: all ranks of `group` decide together, and make the
    same calls. Raises TypeError for another optimizer.
    """

    def __init__(
        self,
        device: str = "cuda",
        *,
        over_ranks: bool = False,
        group: dist.ProcessGroup | None = None,
        **options: float | bool,
    ) -> None:
        super().__init__(device, **options)  # type: ignore[arg-type]
        self._over_ranks, self._group = over_ranks, group

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Where torch unscales, and looks for what is not finite."""
        if not isinstance(optimizer, OffloadedOptimizer):
            raise TypeError(f"an OffloadedOptimizer is wanted, got {type(optimizer).__name__}")
        if not optimizer.unscale(1.0 / inv_scale.item()):
            found_inf = torch.ones_like(found_inf)
        if self._over_ranks:
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self._group)
        return {found_inf.device: found_inf}
