"""Data parallelism: every rank holds the whole model and computes on its own samples.

`ddp` is the wrapper, `reducer` what happens in a backward pass, `join` uneven numbers of batches,
`hooks` what else may travel than the gradients themselves, `tokens` means over tokens, `shared` one
copy of the parameters per node.
"""

from pdt.ddp.ddp import DDP

__all__ = ["DDP"]
