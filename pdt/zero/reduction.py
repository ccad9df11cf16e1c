"""One unit's gradients on their way to their owners."""

from __future__ import annotations

import torch.distributed as dist

from pdt.comm.started import sends_messages, start_reduce_scatter
from pdt.zero.flat_params import FlatParams


class Reduction:
    """Of what `flat` has collected, begun when it is made.

    Messages are summed in place, in this rank's part of the gradients that it sent; so what is
    under way takes the gradients and what arrives, and no third buffer.
    """

    def __init__(self, flat: FlatParams) -> None:
        self._flat = flat
        flat_grad = flat.take_flat_grad()
        numel = flat.layout.shard_numel
        if sends_messages(flat_grad, flat.group):
            self._shard = flat_grad.narrow(0, dist.get_rank(flat.group) * numel, numel)
        else:
            self._shard = flat_grad.new_empty(numel)
        self._started = start_reduce_scatter(self._shard, flat_grad, flat.group)

    def abandon(self) -> None:
        """Wait, and forget the result."""
        self._started.wait()

    def wait(self) -> None:
        """The mean is added to those of this backward."""
        self._started.wait()
        self._flat.add_sum(self._shard)
