"""What the reducer keeps: a slot for each parameter, and the buckets' storage.

`param.grad` is where autograd accumulates. `view` is the parameter's place in its bucket's `flat`
buffer. While a synchronised backward runs, each gradient moves from `.grad` into its view, times
1/world_size; when it ends, `.grad` *is* the view and holds the mean over ranks. What is accumulated
without synchronisation moves there too, times 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pdt.buckets import Bucket, assign_buckets
from pdt.ddp.hooks import GradBucket, Hook
from pdt.flat import unflatten

CHUNK_NBYTES = 1 << 18  # of small gradients that are moved together


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
    than one where a re-entrant checkpoint runs a layer several times; 0 until its first gradient:
    its bucket is then sent at the end). `waits`: its gradient is in `.grad` and to be moved into
    its view. `moved`: one of this backward's gradients has been. `unreduced`: what `.grad` holds
    was accumulated without synchronisation. `skipped`: this backward's graph does not lead to it.
    `hidden`: it has fired though the graph did not show it, being inside a re-entrant checkpoint.
    `filled`: its view has been filled without a gradient, and `kept` is `.grad` as it was, to be
    put back when no rank has a gradient. `view` and `bucket` come with `make_buckets`.
    """

    name: str
    param: nn.Parameter
    node: Any = field(init=False)  # autograd's accumulation node, which lives while it is held
    nbytes: int = field(init=False)
    view: Tensor = field(init=False)
    bucket: Filling = field(init=False)
    fired: int = 0
    expected: int = 0
    waits: bool = False
    moved: bool = False
    unreduced: bool = False
    skipped: bool = False
    hidden: bool = False
    filled: bool = False
    kept: Tensor | None = None

    def __post_init__(self) -> None:
        self.node = get_gradient_edge(self.param).node
        self.nbytes = self.param.numel() * self.param.element_size()

    @property
    def contributes(self) -> bool:
        return self.fired > 0 or (self.unreduced and self.param.grad is not None)

    def fill(self, scale: float) -> None:
        """No gradient in this backward: contribute what `.grad` holds, or zero."""
        grad = self.kept = self.param.grad
        self.filled = True
        if grad is None:
            self.view.zero_()
        elif grad is self.view:
            self.kept = grad.clone()
            self.view.mul_(scale)
        else:
            self.view.copy_(grad).mul_(scale)

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

    def move_specially(self, grad: Tensor | None, scale: float) -> list[Tensor]:
        """What only some gradients need; returns the view if it is to be multiplied yet."""
        if grad is None:  # somebody's hook has taken it away
            if not self.moved:
                self.view.zero_()
            return []
        if grad.requires_grad:
            raise RuntimeError(
                f"{self.name!r} got a gradient with a graph of its own (create_graph=True), which "
                "DDP cannot average: ask torch.autograd.grad for the inputs' gradients with "
                "create_graph=True, or use ddp.module(...) for gradients of this rank alone"
            )
        if self.moved:  # a second one in this backward
            self.view.add_(grad, alpha=scale)
            return []
        self.view.zero_().add_(grad)  # a sparse one
        return [self.view]

    def late_text(self) -> str:
        """The error of a gradient that came when its bucket had been sent."""
        if self.skipped:
            return (
                f"{self.name!r} got a gradient though the graph did not lead to it: with "
                "find_unused_parameters=True use checkpoint(..., use_reentrant=False)"
            )
        return (
            f"{self.name!r} got a gradient after its bucket was sent: its first backward gave it "
            f"{self.expected}, this one gives it more (a re-entrant checkpoint that runs a layer "
            "more often?). Use checkpoint(..., use_reentrant=False), or wrap the model again"
        )


@dataclass(eq=False)
class Filling(GradBucket):
    """A bucket that waits for `pending` of its parameters before it is sent; the gradients of
    `waiting` are still in their parameters' `.grad`."""

    slots: list[Slot] = field(default_factory=list)
    pending: int = 0
    sent: bool = False
    waiting: list[Slot] = field(default_factory=list)
    waiting_nbytes: int = 0

    def reset(self) -> None:
        self.pending, self.sent = len(self.slots), False
        self.waiting, self.waiting_nbytes = [], 0

    def move(self, scale: float, *, keep: bool = False) -> None:
        """Bring the waiting gradients into the buffer, times `scale`.

        `.grad` is None afterwards, so that a later gradient of this backward comes by itself, or,
        to `keep` it, the view. Small ones go together, since calls cost more than bytes there, and
        a large one by itself, in one pass through memory.
        """
        small: list[Tensor] = []
        places: list[Tensor] = []
        scaled: list[Tensor] = []  # views that hold what is still to be multiplied
        for slot in self.waiting:
            grad = slot.param.grad
            if grad is None or grad.requires_grad or grad.is_sparse or slot.moved:
                scaled += slot.move_specially(grad, scale)
            elif grad is slot.view:
                scaled.append(grad)
            elif slot.nbytes >= CHUNK_NBYTES:
                torch.mul(grad, scale, out=slot.view)
            else:
                small.append(grad)
                places.append(slot.view)
        if small:
            torch._foreach_copy_(places, small)
            scaled += places
        if scaled and scale != 1:
            torch._foreach_mul_(scaled, scale)
        for slot in self.waiting:
            slot.param.grad = slot.view if keep else None
            slot.waits, slot.moved = False, not keep
        self.waiting, self.waiting_nbytes = [], 0


def make_buckets(plan: Sequence[Bucket], slots: Sequence[Slot]) -> list[Filling]:
    """Storage for each bucket; gradients that lie in older buckets move over.

    Older buckets are freed as soon as nothing is left in them.
    """
    for slot in slots:
        if hasattr(slot, "view"):
            del slot.bucket
            if slot.param.grad is not slot.view:
                del slot.view
    made = []
    for bucket in plan:
        held = [slots[i] for i in bucket.params]
        flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        views = unflatten(flat, [slot.param for slot in held])
        filling = Filling(bucket.index, flat, views, bucket.index == len(plan) - 1, held)
        for slot, view in zip(held, views, strict=True):
            if hasattr(slot, "view"):
                slot.param.grad = view.copy_(slot.view)
            slot.view, slot.bucket = view, filling
        filling.reset()
        made.append(filling)
    return made
