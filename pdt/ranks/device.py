"""Which device a rank computes on."""

from __future__ import annotations

import os

import torch


def device() -> torch.device:
    """This rank's device: its own GPU when the group is NCCL, else the CPU.

    Reads torchrun's LOCAL_RANK, so it answers alike under torchrun and in `Ranks`.
    """
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    if group is not None and "nccl" in torch.distributed.get_backend(group):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")
