"""Stage 2: gradients go to their owners during backward, and no rank keeps more than its shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from pdt.listen import listen
from pdt.zero.agree import any_rank
from pdt.zero.bucket import ShardedBucket, StartedReduce, fill, must_scale_before
from pdt.zero.zero1 import IN_FLIGHT, Zero1

CHUNK_NBYTES = 1 << 18  # of small gradients that are moved together


@dataclass(eq=False)
class Filling:
    """One bucket in one backward: the gradients that have come, until the last one has.

    `flat_grad` and `views` exist from the first gradient until they are sent. `arrived`: indices of
    parameters whose gradient has come; `waiting`: those whose gradient is still in `.grad`.
    """

    bucket: ShardedBucket
    flat_grad: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    waiting: list[int] = field(default_factory=list)
    waiting_nbytes: int = 0
    sent: bool = False

    @property
    def is_full(self) -> bool:
        return len(self.arrived) == len(self.bucket.params)

    def take(self, index: int) -> None:
        """The gradient of parameter `index` is in `.grad`."""
        param = self.bucket.params[index]
        self.arrived.add(index)
        if index in self.waiting:
            return
        self.waiting.append(index)
        self.waiting_nbytes += param.nbytes
        if self.waiting_nbytes >= CHUNK_NBYTES:
            self.move()

    def move(self) -> None:
        """Bring what waits into the buffer, small gradients together; nobody keeps them then."""
        if self.flat_grad is None:
            self.flat_grad = self.bucket.new_flat()
            self.views = self.bucket.views(self.flat_grad)
        params = self.bucket.params
        first = [i for i in self.waiting if i not in self.moved]
        fill([self.views[i] for i in first], [params[i].grad for i in first], 1.0)
        for i in self.waiting:
            grad = params[i].grad
            if i in self.moved and grad is not None:  # a second one in this backward
                self.views[i].add_(grad.detach())
            params[i].grad = None
        self.moved.update(self.waiting)
        self.waiting, self.waiting_nbytes = [], 0

    def reset(self) -> None:
        """For the next backward."""
        self.flat_grad, self.views = None, []
        self.arrived, self.moved, self.sent = set(), set(), False
        self.waiting, self.waiting_nbytes = [], 0

    def send(self, world_size: int) -> StartedReduce:
        """What has not come counts as zero."""
        self.move()
        flat_grad, views, self.flat_grad, self.views = self.flat_grad, self.views, None, []
        assert flat_grad is not None
        for i in set(range(len(views))) - self.moved:
            views[i].zero_()
        before = must_scale_before(flat_grad.dtype)
        if before:
            flat_grad.div_(world_size)
        self.sent = True
        return self.bucket.start_reduce(flat_grad, scaled=before)


class Zero2(Zero1):
    """`Zero1`, with gradients reduced to their owners while backward runs, and freed at once.

    As soon as a bucket's last gradient has come it is sent, and a rank keeps the mean of its own
    shard; so it never holds more gradients than its shard, the bucket that is being filled and the
    two that are on their way. `.grad` is None after `backward()`. Each backward adds to the shard's
    means until `zero_grad()`, so accumulation needs no word to the optimizer; each costs (n-1)/n of
    the parameters' bytes, unless it stands in `no_sync()`, where gradients add up in `.grad`, whole
    on every rank, until the next backward or the step takes them along. All ranks must run as many
    backwards.

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
        self._completed: list[int] | None = []  # in the first backward, in the order of filling
        self._next = 0  # how many have been sent in this backward
        self._task: int | None = None  # autograd's number of the backward that is open
        self._sync = True
        self._in_flight: deque[StartedReduce] = deque()
        super().__init__(*args, **kwargs)

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

    @torch.no_grad()
    def arrive(self, position: int) -> None:
        """Autograd has accumulated the gradient of the parameter at `position` in `.grad`."""
        if not self._sync:
            return
        if self._task is None:
            self._task = torch._C._current_graph_task_id()
            Variable._execution_engine.queue_callback(self._end)
        self._used = None  # if the means had been looked at, they are others now
        index, i = self._places[position]
        filling = self._fillings[index]
        if filling.sent:
            return
        self._has_mean[position] = True
        filling.take(i)
        if filling.is_full:
            if self._completed is not None and index not in self._completed:
                self._completed.append(index)
            self._send_full()

    def _send_full(self) -> None:
        """Send what is full, in the same order on all ranks."""
        while self._next < len(self._order):
            filling = self._fillings[self._order[self._next]]
            if not filling.is_full:
                return
            self._send(filling)

    def _send(self, filling: Filling) -> None:
        if len(self._in_flight) == IN_FLIGHT:
            self._in_flight.popleft().wait()
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
            device=self._known[0].device,
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

    def _agree(self) -> tuple[list[bool], set[int]]:
        if self._task is not None:
            raise RuntimeError(
                "a backward has not ended (in an exception?), and its gradients are incomplete: "
                "call zero_grad() and run it again"
            )
        left = [param.grad is not None for param in self._known]
        used = [left[i] or self._has_mean[i] for i in range(len(left))]
        used, left = any_rank([used, left], self.group, self._known[0].device)
        return used, {self._places[i][0] for i, is_left in enumerate(left) if is_left}

    def _start_reduce(self, index: int) -> StartedReduce:
        """Of gradients that no backward has taken along."""
        started = super()._start_reduce(index)
        for position, param in zip(
            self.buckets[index].positions, self.buckets[index].params, strict=True
        ):
            self._has_mean[position] |= param.grad is not None
            param.grad = None
        return started

    def _forget_means(self) -> None:
        """They stay until `zero_grad`, as gradients do in torch."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's: also what an unfinished backward has left."""
        self._wait()
        self._reset()
        means = [bucket.shard_grad for bucket in self.buckets]
        super().zero_grad(set_to_none)
        if set_to_none:
            self._has_mean = dict.fromkeys(self._has_mean, False)
            return
        for bucket, mean in zip(self.buckets, means, strict=True):
            bucket.shard_grad = mean if mean is None else mean.zero_()
