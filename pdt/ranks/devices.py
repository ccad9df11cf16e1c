"""Which device a rank computes on."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def device(*, share_gpu: bool = False) -> torch.device:
    """This rank's device: its own GPU when the group is NCCL, else the CPU.

    With `share_gpu`, ranks over gloo take a GPU too if there is one, several the same if there are
    fewer than ranks. Reads torchrun's LOCAL_RANK, so it answers alike under torchrun and `Ranks`.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", local_rank)
    if share_gpu and torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")
