"""What is refused by name, and what is brought to the host in the right form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pdt.flat import is_dense


def check_plain(named: Mapping[Tensor, str]) -> None:
    """ValueError for a parameter with gaps or overlaps in memory, and for a DTensor."""
    for param, name in named.items():
        if any(kind.__name__ == "DTensor" for kind in type(param.data).__mro__):
            raise ValueError(
                f"{name} is a DTensor (of torch's fully_shard?): pdt's own fully_shard has plain "
                "shards, and torch's has CPUOffloadPolicy"
            )
        if not is_dense(param):
            raise ValueError(
                f"{name} of shape {tuple(param.shape)} has strides {param.stride()}, so gaps or "
                "overlaps in memory: give it memory of its own (.clone())"
            )


def on_host(state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """A copy of a parameter's state in the host's memory; what has an element for each of the
    parameter's is in full precision."""
    return {name: _on_host(value, param) for name, value in state.items()}


def _on_host(value: Any, param: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    is_low = value.dtype in (torch.float16, torch.bfloat16) and value.shape == param.shape
    return value.detach().to("cpu", torch.float32 if is_low else value.dtype, copy=True)
