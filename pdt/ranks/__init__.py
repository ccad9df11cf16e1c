"""Live ranks: processes that answer from a notebook cell, with torch.distributed up and counted."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdt.ranks.devices import device
    from pdt.ranks.errors import RankError
    from pdt.ranks.pool import Ranks

__all__ = ["RankError", "Ranks", "device"]

_HOME = {"RankError": "errors", "Ranks": "pool", "device": "devices"}


def __getattr__(name: str) -> Any:
    """Import what is asked for: the doctor must be able to speak where torch is missing."""
    if name in _HOME:
        return getattr(import_module(f"pdt.ranks.{_HOME[name]}"), name)
    raise AttributeError(f"module 'pdt.ranks' has no attribute {name!r}")
