"""Live ranks: processes that answer from a notebook cell, with torch.distributed up and counted."""

from pdt.ranks.device import device
from pdt.ranks.errors import RankError
from pdt.ranks.pool import Ranks

__all__ = ["RankError", "Ranks", "device"]
