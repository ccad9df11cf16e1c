"""What a transformer recomputes: nothing, the cores of its attention, or whole blocks.

Korthikanti et al. 2022, section 5 (arXiv:2205.05198): scores, softmax, dropout and the product with
V keep most of the memory and need few operations, so that to run them twice costs little.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from pdt.model import GPT
from pdt.offload.checkpoint import checkpoint

MODES = ("none", "selective", "full")


def recompute_blocks(model: GPT, mode: str = "full") -> GPT:
    """Let the blocks of `model` checkpoint; returns the model, which computes what it did.

    "full": of a block the graph keeps the input alone, 2sbh bytes at two bytes an element.
    "selective": all but what the core of its attention keeps besides q, k and v, 34sbh. "none":
    everything again. The last call counts. Raises ValueError for another mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is none of {', '.join(MODES)}")
    for block in model.blocks:
        attention = block.attn
        assert isinstance(attention, nn.Module)
        _set(block, "forward", mode == "full")
        _set(attention, "core", mode == "selective")
    return model


def _set(module: nn.Module, method: str, checkpointed: bool) -> None:
    """Under the module's hooks, so that what they do (gather, for one) is done once."""
    vars(module).pop(method, None)
    if checkpointed:
        setattr(module, method, partial(checkpoint, getattr(module, method)))
