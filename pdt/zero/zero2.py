"""Stage 2: gradients go to their owners during backward, and no rank keeps more than its shard."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from pdt.listen import check_unheard, listen
from pdt.zero.bucket import ShardedBucket, StartedReduce
from pdt.zero.filling import Filling
from pdt.zero.zero1 import IN_FLIGHT, Zero1


class Zero2(Zero1):
    """`Zero1`, with gradients reduced to their owners while backward runs, and freed at once.

    As soon as a bucket's last gradient has come it is sent, and a rank keeps the mean of its own
    shard; so, where gradients come bucket by bucket, it never holds more of them than its shard and
    three buckets: one being filled, one on its way, and what backward makes. `.grad` is None after
    `backward()`. Each backward adds to the shard's means until `zero_grad()`, so accumulation needs
    no word to the optimizer; each costs (n-1)/n of the parameters' bytes, unless it stands in
    `no_sync()`, where gradients add up in `.grad`, whole on every rank, until the next backward or
    the step takes them along. All ranks must run as many backwards.

    A gradient that comes when its bucket has been sent (a re-entrant checkpoint, which runs a
    backward in a backward) stays in `.grad` for the next backward or the step: the result is right,
    at the price of memory and of a second reduction.

    Rajbhandari et al. 2020, section 5.2 (arXiv:1910.02054).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._fillings: list[Filling] = []  # of each bucket
        self._places: dict[int, tuple[int, int]] = {}  # by position: the bucket, the index in it
        self._has_mean: dict[int, bool] = {}  # by position: one was sent since zero_grad
        self._order: list[int] = []  # in which buckets are sent
        self._kept: set[int] = set()  # positions whose `.grad` no backward has taken along
        self._has_stepped = False  # with the means that are there
        self._completed: list[int] | None = []  # in the first backward, in the order of filling
        self._next = 0  # how many have been sent in this backward
        self._task: int | None = None  # autograd's number of the backward that is open
        self._sync = True
        self._in_flight: deque[StartedReduce] = deque()
        super().__init__(*args, **kwargs)

    def _check_groups(self) -> None:
        super()._check_groups()
        check_unheard(self._new())

    def _add(self, bucket: ShardedBucket) -> None:
        index = len(self.buckets)
        super()._add(bucket)
        self._fillings.append(Filling(bucket))
        self._order.append(index)
        for i, position in enumerate(bucket.positions):
            self._places[position] = index, i
            self._has_mean[position] = False
        named = [(self.names[p], self._known[p]) for p in bucket.positions]
        listen(self, named, None, keys=bucket.positions)

    # Backward

    def arrive(self, position: int) -> None:
        """Autograd has accumulated the gradient of the parameter at `position` in `.grad`."""
        if not self._sync:
            self._kept.add(position)
            return
        if self._task is None:
            self._begin_backward()
        self._used = None  # if the means had been looked at, they are others now
        index, i = self._places[position]
        filling = self._fillings[index]
        if filling.sent:
            self._kept.add(position)
            return
        self._kept.discard(position)
        self._has_mean[position] = True
        if filling.take(i):
            self._move(filling)
        if filling.is_full:
            if self._completed is not None and index not in self._completed:
                self._completed.append(index)
            self._send_full()

    def _begin_backward(self) -> None:
        self._task = torch._C._current_graph_task_id()
        Variable._execution_engine.queue_callback(self._end)
        for filling in self._fillings:
            filling.begin()
        if self._has_stepped:
            self._has_stepped = False
            warnings.warn(
                "this backward adds to gradients that a step has used: call zero_grad() of the "
                "optimizer, for that of the model does not reach them",
                stacklevel=2,
            )

    def _send_full(self) -> None:
        """Send what is full, in the same order on all ranks."""
        while self._next < len(self._order):
            filling = self._fillings[self._order[self._next]]
            if not filling.is_full:
                return
            self._send(filling)

    @torch.no_grad()
    def _move(self, filling: Filling) -> None:
        """A new buffer takes the place of the oldest that is on its way: three are the most."""
        if filling.flat_grad is None:
            self._make_room()
        filling.move()

    def _make_room(self) -> None:
        if len(self._in_flight) == IN_FLIGHT:
            self._in_flight.popleft().wait()

    @torch.no_grad()
    def _send(self, filling: Filling) -> None:
        self._move(filling)
        self._make_room()
        self._in_flight.append(filling.send(self.world_size))
        self._next += 1

    @torch.no_grad()
    def _end(self) -> None:
        """The backward is over: send the rest, with zeros for what has not come, and wait."""
        try:
            for index in self._order[self._next :]:
                self._send(self._fillings[index])
            self._wait()
            if self._completed is not None:
                self._learn_order()
        finally:
            self._reset()

    def _wait(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().wait()

    def _learn_order(self) -> None:
        """From now on buckets are sent in the order in which rank 0's were filled."""
        completed = self._completed or []
        order = torch.tensor(
            [*completed, *(i for i in self._order if i not in completed)],
            device=self._device,
        )
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.broadcast(order, source, group=self.group)
        self._order, self._completed = order.tolist(), None

    def _reset(self) -> None:
        self._task, self._next = None, 0
        self._in_flight.clear()
        for filling in self._fillings:
            filling.reset()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block add up in `.grad`, on this rank alone."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # The step

    def _flags(self) -> list[list[bool]]:
        """Which parameters have a gradient here, and which have one that was not taken along."""
        if self._task is not None:
            raise RuntimeError(
                "a backward has not ended (in an exception?), and its gradients are incomplete: "
                "call zero_grad() and run it again"
            )
        left = [param.grad is not None for param in self._known]
        for position, is_left in enumerate(left):
            if is_left and self._has_mean[position] and position not in self._kept:
                raise RuntimeError(
                    f"the .grad of {self.names[position]} was set after it had been taken along: "
                    "by a DistributedDataParallel around the model? Take it off. By hand? Call "
                    "zero_grad() before"
                )
        used = [is_left or self._has_mean[i] for i, is_left in enumerate(left)]
        return [used or [False], left or [False]]

    def _choose(self, flags: list[list[bool]]) -> tuple[list[bool], set[int]]:
        used, left = flags
        return used, {self._places[i][0] for i, is_left in enumerate(left) if is_left}

    def _start_reduce(self, index: int) -> StartedReduce:
        """Of gradients that no backward has taken along."""
        started = super()._start_reduce(index)
        for position, param in zip(
            self.buckets[index].positions, self.buckets[index].params, strict=True
        ):
            self._has_mean[position] |= param.grad is not None
            self._kept.discard(position)
            param.grad = None
        return started

    def _after_step(self) -> None:
        """The means stay until `zero_grad`, as gradients do in torch."""
        self._has_stepped = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's: also what an unfinished backward has left."""
        self._wait()
        self._reset()
        self._has_stepped = False
        if set_to_none:
            super().zero_grad()
            self._kept.clear()
            self._has_mean = dict.fromkeys(self._has_mean, False)
            return
        torch.optim.Optimizer.zero_grad(self, set_to_none=False)
        self._used = None
        for bucket in self.buckets:
            if bucket.shard_grad is not None:
                bucket.shard_grad.zero_()
