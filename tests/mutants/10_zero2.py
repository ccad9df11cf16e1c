"""Wrong solutions of lesson 10: freed too late, sent to all, copied where a sum is needed."""

from collections import deque

import torch
import torch.distributed as dist
from torch.autograd import Variable

from pdt.comm.started import start_all_gather, start_reduce_scatter
from pdt.flat import ShardLayout, unflatten
from tests.mutants import mutant

MEAN = "adds this rank's shard of the mean, in every backward"
NO_GRAD = "leaves no .grad behind"
EARLY = "sends a group before the next one's gradients come"
LITTLE = "holds its shards, one group that fills and two on their way"
ONCE = "sends (n-1)/n of the gradients in a backward"
SUM = "uses the sum over a step's micro-batches, in every step"
MISSING = "counts a missing gradient as zero"
SHARD = "keeps no more than its shard between micro-batches"
TRAFFIC = "sends (k+1)(n-1)/n of the parameters in a step of k micro-batches"
MEASURED = "is within 5 % of what Zero2 holds"
COMPUTED = "is right for any limit and any number of ranks"


class Freeing:
    """The right hooks, in parts that a mutant replaces."""

    limit = 2

    def __init__(self, groups, shards):
        self.groups, self.shards, self.n = groups, shards, dist.get_world_size()
        self.layouts = [ShardLayout(tuple(p.numel() for p in group), self.n) for group in groups]
        self.flats, self.missing, self.way, self.running = {}, {}, deque(), False
        for g, group in enumerate(groups):
            for i, p in enumerate(group):
                p.register_post_accumulate_grad_hook(lambda p, g=g, i=i: self.arrive(g, i, p))

    def arrive(self, g, i, p):
        if not self.running:
            self.running = True
            Variable._execution_engine.queue_callback(self.end)
        if g not in self.flats:
            self.flats[g], self.missing[g] = self.new_flat(g), len(self.groups[g])
        self.take(g, i, p)
        self.missing[g] -= 1
        if self.missing[g] == 0:
            self.full(g)

    def new_flat(self, g):
        return torch.zeros(self.layouts[g].padded_numel, dtype=torch.float64)

    def take(self, g, i, p):
        views = unflatten(self.flats[g][: self.layouts[g].offsets[-1]], self.groups[g])
        views[i].copy_(p.grad)
        p.grad = None

    def full(self, g):
        if len(self.way) == self.limit:
            self.finish(*self.way.popleft())
        self.way.append(self.send(g, self.flats.pop(g)))

    def send(self, g, flat):
        mine = torch.empty_like(self.shards[g])
        return g, start_reduce_scatter(mine, flat), mine

    def finish(self, g, started, mine):
        started.wait()
        self.shards[g] += mine / self.n

    def end(self):
        while self.way:
            self.finish(*self.way.popleft())
        self.running = False


@mutant("free_as_you_go", fails=(EARLY, LITTLE))
def after_backward(groups, shards):
    """Reduces when backward is over: every gradient is there until then, and nothing overlaps."""

    class Late(Freeing):
        def full(self, g):
            pass

        def end(self):
            for g in range(len(self.groups)):
                super().full(g)
            super().end()

    Late(groups, shards)


@mutant("free_as_you_go", fails=(NO_GRAD, LITTLE))
def keeps_grad(groups, shards):
    """Copies each gradient into its bucket and keeps it, too."""

    class Keeping(Freeing):
        def take(self, g, i, p):
            grad = p.grad
            super().take(g, i, p)
            p.grad = grad

    Keeping(groups, shards)


@mutant("free_as_you_go", fails=MEAN)
def one_buffer_for_all(groups, shards):
    """The next group fills the buffer that the one before is still being sent from."""

    class Reusing(Freeing):
        def new_flat(self, g):
            if not hasattr(self, "buffer"):
                most = max(layout.padded_numel for layout in self.layouts)
                self.buffer = torch.zeros(most, dtype=torch.float64)
            return self.buffer[: self.layouts[g].padded_numel].zero_()

    Reusing(groups, shards)


@mutant("free_as_you_go", fails=ONCE)
def sends_to_everybody(groups, shards):
    """An all-reduce: each rank gets the means of all shards, keeps its own and drops the rest."""

    class AllReducing(Freeing):
        def send(self, g, flat):
            return g, dist.all_reduce(flat, async_op=True), flat.chunk(self.n)[dist.get_rank()]

    AllReducing(groups, shards)


@mutant("free_as_you_go", fails=(EARLY, LITTLE))
def bucket_of_all(groups, shards):
    """One buffer for all groups, so the first message waits for the last gradient."""

    class Whole(Freeing):
        def full(self, g):
            if g == len(self.groups) - 1:
                for each in range(g + 1):
                    super().full(each)

        def new_flat(self, g):
            if g == 0:
                self.starts = [0]
                for layout in self.layouts:
                    self.starts.append(self.starts[-1] + layout.padded_numel)
                self.buffer = torch.zeros(self.starts[-1], dtype=torch.float64)
            return self.buffer[self.starts[g] : self.starts[g + 1]]

    Whole(groups, shards)


@mutant("free_as_you_go", fails=LITTLE)
def waits_for_nothing(groups, shards):
    """All groups are on their way until backward has ended, each with the others' terms."""

    class Unlimited(Freeing):
        limit = 10**9

    Unlimited(groups, shards)


class Sums:
    """The right sums, in parts that a mutant replaces."""

    def __init__(self, params, lr):
        self.params, self.lr, self.n = params, lr, dist.get_world_size()
        self.layout = ShardLayout(tuple(p.numel() for p in params), self.n)
        self.flat = self.new_flat()
        for p, view in zip(params, self.views(self.flat), strict=True):
            view.copy_(p.detach())
            p.data = view
        self.sum = None

    def new_flat(self):
        return torch.zeros(self.layout.padded_numel, dtype=torch.float64)

    def views(self, flat):
        return unflatten(flat[: self.layout.offsets[-1]], self.params)

    def mine(self, flat):
        return flat.chunk(self.n)[dist.get_rank()]

    def add(self):
        flat = self.laid_out()
        for p in self.params:
            p.grad = None
        self.take(self.reduced(flat) / self.n)

    def laid_out(self):
        flat = self.new_flat()
        for p, view in zip(self.params, self.views(flat), strict=True):
            if p.grad is not None:
                view.copy_(p.grad)
        return flat

    def reduced(self, flat):
        shard = torch.empty_like(self.mine(flat))
        start_reduce_scatter(shard, flat).wait()
        return shard

    def take(self, mean):
        self.sum = mean if self.sum is None else self.sum + mean

    def step(self):
        if self.sum is not None:
            with torch.no_grad():
                self.mine(self.flat).sub_(self.lr * self.sum)
        self.clear()
        start_all_gather(self.flat).wait()

    def clear(self):
        self.sum = None


@mutant("ShardSums", fails=SUM)
class Copies(Sums):
    """The shard's gradient is what has arrived last: right as long as nobody accumulates."""

    def take(self, mean):
        self.sum = mean


@mutant("ShardSums", fails=(SUM, MISSING))
class NeverClears(Sums):
    """The next step uses this step's gradients again."""

    def clear(self):
        pass


@mutant("ShardSums", fails=SHARD)
class KeepsGradUntilTheStep(Sums):
    """Lets `.grad` accumulate and reduces in the step: stage 1."""

    def add(self):
        pass

    def step(self):
        if any(p.grad is not None for p in self.params):
            super().add()
        super().step()


@mutant("ShardSums", fails=TRAFFIC)
class SendsToEverybody(Sums):
    """An all-reduce where an owner needs its shard alone."""

    def reduced(self, flat):
        dist.all_reduce(flat)
        return self.mine(flat).clone()


@mutant("ShardSums", fails=(MISSING, SHARD))
class ForgetsTheZero(Sums):
    """One buffer for all micro-batches: what is missing shows the gradient of the last time."""

    def laid_out(self):
        if not hasattr(self, "buffer"):
            self.buffer = self.new_flat()
        for p, view in zip(self.params, self.views(self.buffer), strict=True):
            if p.grad is not None:
                view.copy_(p.grad)
        return self.buffer


def by_rule(buckets, n, limit, way=2.0, arrived=None):
    """The rule; `way` and `arrived` are what a bucket holds, over its size."""
    most, kept, flying = 0, 0, []
    for bucket in buckets:
        padded = n * -(-sum(bucket) // n)
        held = kept + way * sum(flying) + bucket[0]
        most = max(most, held)
        if len(flying) == limit:
            most = max(most, held + min(n - 2, 2) * flying[0] / n)
            kept += flying.pop(0) * (1 / n if arrived is None else arrived)
        most = max(most, kept + way * sum(flying) + padded + max(bucket))
        flying.append(padded)
        most = max(most, kept + way * sum(flying))
    return round(max(most, kept + way * sum(flying) + min(n - 2, 2) * flying[0] / n))


@mutant("predict_gradient_peak", fails=(MEASURED, COMPUTED))
def forgets_the_others_terms(buckets, n, in_flight, item):
    """A bucket on its way is its buffer alone; the sum has no terms."""
    return item * by_rule(buckets, n, in_flight, way=1 + 1 / n)


@mutant("predict_gradient_peak", fails=(MEASURED, COMPUTED))
def keeps_whole_buckets(buckets, n, in_flight, item):
    """What has arrived stays whole, as if gradients were not sharded."""
    return item * by_rule(buckets, n, in_flight, arrived=1)


@mutant("predict_gradient_peak", fails=(MEASURED, COMPUTED))
def forgets_what_has_arrived(buckets, n, in_flight, item):
    """Only what moves; the shards that stay are forgotten."""
    return item * by_rule(buckets, n, in_flight, arrived=0)


@mutant("predict_gradient_peak", fails=COMPUTED)
def always_two_in_flight(buckets, n, in_flight, item):
    """The limit of the package, whatever limit is asked for."""
    return item * by_rule(buckets, n, 2)


@mutant("predict_gradient_peak", fails=(MEASURED, COMPUTED))
def all_in_flight(buckets, n, in_flight, item):
    """As if nobody waited: all buckets on their way at the end."""
    return item * by_rule(buckets, n, len(buckets) + 1)


@mutant("predict_gradient_peak", fails=(MEASURED, COMPUTED))
def elements(buckets, n, in_flight, item):
    """Elements, not bytes."""
    return by_rule(buckets, n, in_flight)
