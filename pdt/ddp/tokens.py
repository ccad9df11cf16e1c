"""Means over all tokens, when the ranks hold different numbers of them.

Data parallelism averages gradients over ranks. If each rank's loss is a mean over its own tokens,
the result is a mean of means: a token on a rank with few of them counts for more. The right loss is
the sum of all losses over the number of all tokens, and since backward is linear, that takes one
factor for each rank, and one all-reduce of a count.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def token_mean(
    loss_sum: Tensor,
    num_tokens: int | Tensor,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The loss to call `backward` on: its mean over the ranks is the mean over all their tokens.

    `loss_sum` is the sum (not the mean) of the losses of this rank's `num_tokens` tokens. The
    result is `loss_sum * world_size / all tokens`; DDP's division by the world size then leaves the
    gradient of the true mean. For a batch in one piece: with accumulation, see `token_scale`.
    Raises what `token_scale` raises.
    """
    return loss_sum * token_scale(num_tokens, group=group, device=loss_sum.device)


def token_scale(
    num_tokens: int | Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> float:
    """The world size over the tokens of all ranks: the factor of each rank's sums of losses.

    With gradient accumulation `num_tokens` counts the whole window, known before its first forward
    (count the targets, not the losses), and every micro-batch runs `(loss_sum * scale).backward()`:
    a factor for each micro-batch would be a mean of means again. One all-reduce of 16 bytes on
    `device` (with NCCL: the rank's GPU), whose result the host waits for.

    A rank may have no tokens. Raises ValueError on every rank when no rank has any, and when one of
    them passes something else than a whole number of 0 or more.
    """
    count = _checked(num_tokens)
    seen = torch.tensor([max(count, 0), int(count < 0)], dtype=torch.int64, device=device)
    dist.all_reduce(seen, group=group)
    total, wrong = seen.tolist()
    if wrong:
        raise ValueError(
            f"num_tokens must be a whole number of 0 or more on every rank; it is not on {wrong}, "
            f"and here it is {num_tokens!r}"
        )
    if not total:
        raise ValueError("no rank has a token: skip this batch on all of them, it has no mean")
    return dist.get_world_size(group) / total


def _checked(num_tokens: int | Tensor) -> int:
    """The count, or -1 for what is none: the other ranks must hear of it before this one raises."""
    if isinstance(num_tokens, Tensor):
        whole = not (num_tokens.is_floating_point() or num_tokens.is_complex())
        return max(-1, int(num_tokens)) if whole and num_tokens.numel() == 1 else -1
    return max(-1, num_tokens) if isinstance(num_tokens, int) else -1
