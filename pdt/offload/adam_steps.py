"""One step of AdamW by torch, three ways of one signature, and what each asks of memory.

AdamW does a dozen operations on numbers that it reads once, so memory sets its pace: the five sizes
of ZeRO-Offload's Table 4 (Ren et al. 2021, arXiv:2101.06840) all say about 20 GB/s for torch's CPU
Adam of that time and 100 to 136 for theirs, at 30 bytes a parameter. `bytes_per_element` is the
formula, `triad` what memory gives. The rule is that of Loshchilov & Hutter 2019 (arXiv:1711.05101),
in torch's order of operations.

Each function takes lists of tensors (one flat tensor, or a model's), changes params, exp_avgs and
exp_avg_sqs in place and leaves the gradients as they are. `step` counts from 1. The fourth way,
which also does what stands before and behind a step, is in adam_pass.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from pdt.offload import kernel

Tensors = list[Tensor]


@dataclass(frozen=True)
class Settings:
    """What AdamW is told, as torch.optim.AdamW names it. Raises ValueError for what cannot be."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if not getattr(self, name) >= 0:  # so written, NaN is refused too
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must be 0 or more and less than 1")

    def biases(self, step: int) -> tuple[float, float]:
        """lr divided by the first moment's bias correction, and the root of the second's."""
        if step < 1:
            raise ValueError(f"step={step} must be 1 for the first step")
        beta1, beta2 = self.betas
        return self.lr / (1 - beta1**step), (1 - beta2**step) ** 0.5


DEFAULT = Settings()


@torch.no_grad()
def adamw_loop(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    step: int,
    settings: Settings = DEFAULT,
) -> None:
    """Operation by operation, as torch.optim.AdamW(foreach=False): bitwise equal to it."""
    (beta1, beta2), (step_size, root2) = settings.betas, settings.biases(step)
    for p, grad, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        g = -grad if settings.maximize else grad
        if settings.weight_decay:
            p.mul_(1 - settings.lr * settings.weight_decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denom = (v.sqrt() / root2).add_(settings.eps)
        p.addcdiv_(m, denom, value=-step_size)


@torch.no_grad()
def adamw_foreach(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    step: int,
    settings: Settings = DEFAULT,
) -> None:
    """As the loop, with one call for all tensors: fewer calls, as many passes over memory."""
    (beta1, beta2), (step_size, root2) = settings.betas, settings.biases(step)
    if settings.maximize:
        grads = list(torch._foreach_neg(grads))
    if settings.weight_decay:
        torch._foreach_mul_(params, 1 - settings.lr * settings.weight_decay)
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    denoms = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denoms, root2)
    torch._foreach_add_(denoms, settings.eps)
    torch._foreach_addcdiv_(params, exp_avgs, denoms, -step_size)


@torch.no_grad()
def adamw_fused(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    step: int,
    settings: Settings = DEFAULT,
) -> None:
    """One pass, by the call that torch.optim.AdamW(fused=True) makes."""
    settings.biases(step)  # refuses a step below 1
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [torch.tensor(float(step))] * len(params),
        amsgrad=False,
        lr=settings.lr,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        maximize=settings.maximize,
    )


# Of float32 numbers other than the gradient: how many each element's step reads and writes, and how
# many of the written ones lie in memory that is new. Operation by operation, these are param.mul_,
# exp_avg.lerp_, exp_avg_sq.mul_, .addcmul_, .sqrt(), / root2, .add_ and param.addcdiv_.
PASSES = {
    "loop": (1 + 1 + 1 + 1 + 1 + 1 + 1 + 3, 8, 2),
    "foreach": (1 + 1 + 1 + 1 + 1 + 1 + 1 + 3, 8, 1),
    "fused": (3, 3, 0),
    "one_pass": (3, 3, 0),
}
GRAD_READS = {"loop": 2, "foreach": 2, "fused": 1, "one_pass": 1}
TRIAD_NBYTES = 16  # a = b + s * c: two read, one written and, for that, one more read


def bytes_per_element(
    variant: str,
    *,
    grad_nbytes: int = 4,
    copy_nbytes: int = 0,
    scaled: bool = False,
    write_allocate: bool = False,
) -> int:
    """Bytes that one step of float32 parameters moves for each of them.

    `variant` is "loop", "foreach", "fused" or "one_pass". `scaled`: gradients are divided by a
    scale; `copy_nbytes`: of an element of the copy in another precision, if one is made. The first
    three do both in passes of their own. With `write_allocate`, memory that is written without
    having been read counts twice, for a cache reads a line before it changes a part of it.
    """
    if variant not in PASSES:
        raise ValueError(f"variant={variant!r} must be one of {', '.join(PASSES)}")
    reads, writes, new = PASSES[variant]
    nbytes = 4 * (reads + writes) + grad_nbytes * GRAD_READS[variant] + copy_nbytes
    if variant != "one_pass":
        nbytes += 2 * grad_nbytes * scaled + 4 * bool(copy_nbytes)  # grad *= s; copy.copy_(param)
    return nbytes + (4 * new + copy_nbytes) * write_allocate


def triad(numel: int, repeats: int = 5, *, compiled: bool | None = None) -> float:
    """Bytes per second of STREAM's triad a = b + s * c on float32 (numel,): the best of `repeats`.

    Counts `TRIAD_NBYTES` an element, what really moves: compare it with `bytes_per_element(...,
    write_allocate=True)`. Same compiler, flags and threads as the compiled AdamW; `torch.add` where
    there is none, or with compiled=False.
    """
    b, c = torch.ones(numel), torch.ones(numel)
    a, best_s = torch.zeros(numel), float("inf")
    if compiled is None:
        compiled = kernel.available()
    for _ in range(repeats):
        start_s = time.perf_counter()
        if compiled:
            kernel.get().triad(a, b, c, 3.0)
        else:
            torch.add(b, c, alpha=3.0, out=a)
        best_s = min(best_s, time.perf_counter() - start_s)
    return TRIAD_NBYTES * numel / best_s
