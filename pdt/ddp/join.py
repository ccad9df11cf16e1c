"""Ranks with uneven numbers of batches: a rank that has run out answers the others' calls.

While `join` lasts, each synchronised forward and each synchronised backward begins with one small
all-reduce in which every rank says what it is about to do; a rank without batches says so, and then
makes the same calls with zeros. It is what torch's Join does, but told twice a step, so that two
forwards before one backward are followed as well.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

STOPPED, FORWARD, BACKWARD = 0, 1, 2


class Join:
    """One `with ddp.join()` block on this rank.

    `on_forward(rank)` shadows a forward whose buffers come from `rank`, `on_backward()` shadows a
    backward; `set_scale(x)` is told what gradients are to be multiplied by.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        set_scale: Callable[[float], None],
        *,
        divide_by_initial_world_size: bool,
        throw_on_early_termination: bool,
    ) -> None:
        self.group, self.device, self.set_scale = group, device, set_scale
        self.initial, self.throws = divide_by_initial_world_size, throw_on_early_termination
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.source = 0  # the first rank that still has batches: its buffers count

    def tell(self, what: int) -> int:
        """Say what this rank is about to do; returns what the others are, STOPPED if none is.

        Raises RuntimeError on every rank when some go forward while others go backward, and, if so
        asked, when one has stopped while others have not.
        """
        told = torch.zeros(self.world_size, dtype=torch.int32, device=self.device)
        told[self.rank] = what
        dist.all_reduce(told, group=self.group)
        each = told.tolist()
        active = [rank for rank, code in enumerate(each) if code != STOPPED]
        if not active:
            return STOPPED
        if self.throws and len(active) < self.world_size:
            idle = [rank for rank in range(self.world_size) if rank not in active]
            raise RuntimeError(
                f"ranks {idle} have no batches left while ranks {active} go on, and "
                "throw_on_early_termination was set"
            )
        if len({each[rank] for rank in active}) > 1:
            raise RuntimeError(
                f"inside join() ranks must make the same steps, but they are at {each} "
                "(0: stopped, 1: forward, 2: backward)"
            )
        self.source = active[0]
        self.set_scale(1 / (self.world_size if self.initial else len(active)))
        return each[active[0]]

    def shadow(self, on_forward: Callable[[int], None], on_backward: Callable[[], None]) -> None:
        """Answer the others' calls until no rank has a batch left."""
        while (what := self.tell(STOPPED)) != STOPPED:
            if what == FORWARD:
                on_forward(self.source)
            else:
                on_backward()
