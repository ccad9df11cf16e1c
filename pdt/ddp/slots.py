"""What the reducer keeps: a slot for each parameter, and the buckets' storage.

`param.grad` is where autograd accumulates. `view` is the parameter's place in its bucket's `flat`
buffer. While a synchronised backward runs, each gradient moves from `.grad` into its view, times
1/world_size; when it ends, `.grad` *is* the view and holds the mean over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdt.buckets import Bucket, assign_buckets
from pdt.ddp.hooks import GradBucket, Hook
from pdt.flat import unflatten


@dataclass(frozen=True)
class Settings:
    """How gradients are laid out and sent."""

    group: dist.ProcessGroup | None
    bucket_cap_mb: float
    first_bucket_mb: float
    hook: Hook
    find_unused: bool
    grad_dtype: torch.dtype | None

    def plan(self, params: Sequence[Tensor], order: Sequence[int] | None = None) -> list[Bucket]:
        caps = {"bucket_cap_mb": self.bucket_cap_mb, "first_bucket_mb": self.first_bucket_mb}
        dtypes = [self.grad_dtype or param.dtype for param in params]
        return assign_buckets(params, **caps, order=order, dtypes=dtypes)


@dataclass(eq=False, slots=True)
class Slot:
    """One parameter's state.

    `fired` counts its gradients in this backward, `expected` those after which it is complete (more
    than one where a re-entrant checkpoint runs a layer several times). `unreduced`: `.grad` holds
    what was accumulated without synchronisation. `skipped`: this backward's graph does not lead to
    it. `hidden`: it has fired though the graph did not show it, being inside a re-entrant
    checkpoint. `filled`: its view has been filled without a gradient, and `kept` is `.grad` as it
    was, to be put back when no rank has a gradient. `view` and `bucket` come with `make_buckets`.
    """

    name: str
    param: nn.Parameter
    node: Any  # autograd's accumulation node; held, since autograd itself would let go of it
    view: Tensor = field(init=False)
    bucket: Filling = field(init=False)
    fired: int = 0
    expected: int = 1
    unreduced: bool = False
    skipped: bool = False
    hidden: bool = False
    filled: bool = False
    kept: Tensor | None = None

    @property
    def contributes(self) -> bool:
        return self.fired > 0 or (self.unreduced and self.param.grad is not None)

    def put(self, grad: Tensor, scale: float) -> None:
        """The view becomes `grad * scale`, in one pass through memory where that is possible."""
        if grad is self.view:
            if scale != 1:
                self.view.mul_(scale)
        elif grad.is_sparse or grad.dtype != self.view.dtype:
            self.view.zero_().add_(grad, alpha=scale)
        else:
            torch.mul(grad, scale, out=self.view)

    def fill(self, scale: float) -> None:
        """No gradient in this backward: contribute what `.grad` holds, or zero."""
        grad = self.kept = self.param.grad
        self.filled = True
        if grad is None:
            self.view.zero_()
            return
        if grad is self.view:
            self.kept = grad.clone()
        self.put(grad, scale)

    def is_reached(self) -> bool:
        """Whether the backward that is running leads to this parameter."""
        try:
            return torch._C._will_engine_execute_node(self.node)
        except RuntimeError as error:  # so torch says that autograd.grad captures the leaf
            raise RuntimeError(
                f"torch.autograd.grad was asked for the gradient of {self.name!r}, which DDP "
                "cannot average: call loss.backward(), or use ddp.module(...) for gradients of "
                "this rank alone"
            ) from error

    def late_text(self) -> str:
        """The error of a gradient that came when its bucket had been sent."""
        if self.skipped:
            return (
                f"{self.name!r} got a gradient though the graph did not lead to it: with "
                "find_unused_parameters=True use checkpoint(..., use_reentrant=False)"
            )
        return (
            f"{self.name!r} got a gradient after its bucket was sent: the first backward gave it "
            f"{self.expected}, this one gives it more (a re-entrant checkpoint that runs a layer "
            "more often?). Use checkpoint(..., use_reentrant=False), or wrap the model again"
        )


@dataclass(eq=False)
class Filling(GradBucket):
    """A bucket that waits for `pending` of its parameters before it is sent."""

    slots: list[Slot] = field(default_factory=list)
    pending: int = 0
    sent: bool = False

    def reset(self) -> None:
        self.pending, self.sent = len(self.slots), False


def make_buckets(plan: Sequence[Bucket], slots: Sequence[Slot], scale: float) -> list[Filling]:
    """Storage for each bucket, and into it the gradients that have come, times `scale`.

    One bucket after the other, each gradient freed when it has moved, so that never more than one
    bucket stands beside the gradients that it replaces.
    """
    made = []
    for bucket in plan:
        held = [slots[i] for i in bucket.params]
        flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        views = unflatten(flat, [slot.param for slot in held])
        filling = Filling(bucket.index, flat, views, bucket.index == len(plan) - 1, held)
        for slot, view in zip(held, views, strict=True):
            slot.view, slot.bucket = view, filling
            if slot.fired and slot.param.grad is not None:
                slot.put(slot.param.grad, scale)
                slot.param.grad = None
        filling.reset()
        made.append(filling)
    return made
