"""Who holds what: the models and optimizers that a ledger looks at."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def with_inner(optimizers: list[Any]) -> list[Any]:
    """Also those that ZeroRedundancyOptimizer or pdt's wrap, and what these wrap: they hold the
    states."""
    found = []
    for optimizer in optimizers:
        inner = [getattr(optimizer, "optim", None), *getattr(optimizer, "optims", ())]
        found += [optimizer, *with_inner([o for o in inner if o is not None])]
    return found


def put_first(parameter: torch.Tensor, number: int) -> None:
    """This hook before the others."""
    hooks = parameter._post_accumulate_grad_hooks
    items = [(number, hooks[number]), *((k, v) for k, v in hooks.items() if k != number)]
    hooks.clear()  # torch goes through them in the order of insertion
    hooks.update(items)


def several(value: Any) -> list[Any]:
    """One or several, or none, as a list."""
    if value is None:
        return []
    if isinstance(value, (nn.Module, torch.optim.Optimizer)) or not isinstance(value, Iterable):
        return [value]
    return list(value)
