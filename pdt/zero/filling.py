"""A bucket that fills while backward runs: gradients move into its buffer as they come."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from pdt.zero.bucket import ShardedBucket, StartedReduce, fill, must_scale_before

CHUNK_NBYTES = 1 << 18  # of small gradients that are moved together


@dataclass(eq=False)
class Filling:
    """One bucket in one backward: the gradients that have come, until the last one has.

    `flat_grad` and `views` exist from the first gradient until they are sent. `arrived`: indices of
    parameters whose gradient has come, `expected`: how many will; `waiting`: those whose gradient
    is still in `.grad`.
    """

    bucket: ShardedBucket
    flat_grad: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    waiting: list[int] = field(default_factory=list)
    waiting_nbytes: int = 0
    sent: bool = False
    expected: int = 0

    def __post_init__(self) -> None:
        self._nbytes = [param.nbytes for param in self.bucket.params]

    def begin(self) -> None:
        """A backward begins: what is frozen now will not come."""
        self.expected = sum(param.requires_grad for param in self.bucket.params)

    @property
    def is_full(self) -> bool:
        return len(self.arrived) == self.expected

    def take(self, index: int) -> bool:
        """The gradient of parameter `index` is in `.grad`; whether to move what waits now."""
        self.arrived.add(index)
        if index not in self.waiting:
            self.waiting.append(index)
            self.waiting_nbytes += self._nbytes[index]
        return self.waiting_nbytes >= CHUNK_NBYTES

    def move(self) -> None:
        """Bring what waits into the buffer, small gradients together; nobody keeps them then."""
        if self.flat_grad is None:
            self.flat_grad = self.bucket.new_flat()
            self.views = self.bucket.grad_views(self.flat_grad)
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
        """What has been moved; what has not come counts as zero."""
        flat_grad, views, self.flat_grad, self.views = self.flat_grad, self.views, None, []
        assert flat_grad is not None
        for i in set(range(len(views))) - self.moved:
            views[i].zero_()
        before = must_scale_before(flat_grad.dtype)
        if before:
            flat_grad.div_(world_size)
        self.sent = True
        return self.bucket.start_reduce(flat_grad, scaled=before)
