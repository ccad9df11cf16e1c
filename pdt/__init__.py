"""pdt: parallel and distributed training, built step by step on real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdt.ranks import RankError, Ranks

__version__ = "0.1.0"
__all__ = ["RankError", "Ranks", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the live ranks only when they are asked for: `pdt.model` alone needs none of them."""
    if name in ("RankError", "Ranks"):
        import pdt.ranks

        return getattr(pdt.ranks, name)
    raise AttributeError(f"module 'pdt' has no attribute {name!r}")


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext pdt` makes `%%ranks` known to the notebook."""
    from pdt.ranks.magic import RanksMagics

    ipython.register_magics(RanksMagics)
