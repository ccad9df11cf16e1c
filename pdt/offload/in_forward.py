"""A model whose parts wait for their own parameters, just before they use them."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import Tensor, nn


class Returning(Protocol):
    """Who brings the parameters."""

    def wait_for(self, param: Tensor) -> None:
        """Return when this one is there, if it is to come."""

    def synchronize(self) -> None:
        """Return when all are."""


def wait_in_forward(model: nn.Module, optimizer: Returning) -> None:
    """Each part waits before its forward, and `model.state_dict()` for all.

    The hooks do not keep the optimizer alive. Raises ValueError for sharded parameters.
    """
    for name, param in model.named_parameters():
        if type(param) is not nn.Parameter:
            raise ValueError(f"{name} is sharded: its step cannot be waited for in forward")
    reference = weakref.ref(optimizer)

    def arrived(module: nn.Module, *_: Any) -> None:
        if (owner := reference()) is not None:
            for param in module.parameters(recurse=False):
                owner.wait_for(param)

    def all_arrived(*_: Any) -> None:
        if (owner := reference()) is not None:
            owner.synchronize()

    for module in model.modules():
        module.register_forward_pre_hook(arrived)
    model.register_state_dict_pre_hook(all_arrived)
