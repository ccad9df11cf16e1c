"""Wrong solutions of lesson 11: full copies, replicas, gathers too many, too early, too late."""

import torch
import torch.distributed as dist
from torch import nn

from pdt.comm.started import start_all_gather, start_reduce_scatter
from pdt.flat import ShardLayout, unflatten
from tests.mutants import mutant

SLICE = "returns this rank's slice of the parameters"
ONE_PROCESS = "computes what one process computes"
MEAN = "leaves the mean gradient of its slice in the shard's .grad"
HOLDS = "holds 1/n between uses"
ONE_UNIT = "has one unit whole at a time"
TRAFFIC = "sends 3(n-1)/n of the parameters in a step"
READY = "has each unit whole when it computes"
NOW = "computes with the shards as they are now"
AHEAD = "begins the next gather before the unit computes"
NO_WAIT = "does not wait for the next gather"
ONE_AHEAD = "is one unit ahead at most"
NOTHING_LEFT = "leaves nothing gathered after a pass"
ONCE = "gathers each unit once in a pass"
EXACT = "is exact"
NEAR = "is within 5 % of a run on real storages"


class Unit:
    """The right one, from which the wrong ones differ in one thing."""

    def __init__(self, module):
        self.params = list(module.parameters())
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.layout = ShardLayout(tuple(p.numel() for p in self.params), self.n)
        self.whole = torch.zeros(self.layout.padded_numel, dtype=self.params[0].dtype)
        for p, view in zip(self.params, self.views(self.whole), strict=True):
            view.copy_(p.detach())
            p.data = view
            p.register_post_accumulate_grad_hook(self.arrive)
        self.missing = len(self.params)
        self.shard = nn.Parameter(self.own(self.whole).clone())
        self.free()
        module.register_forward_pre_hook(lambda module, args: self.gather())
        module.register_forward_hook(self.after_forward)

    def own(self, flat):
        return flat.chunk(self.n)[self.rank]

    def views(self, flat):
        return unflatten(flat[: self.layout.offsets[-1]], self.params)

    def gather(self):
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.own(self.whole).copy_(self.shard.detach())
        start_all_gather(self.whole).wait()

    def free(self):
        self.whole.untyped_storage().resize_(0)

    def after_forward(self, module, args, output):
        self.free()
        output.register_hook(lambda grad: self.gather())

    def arrive(self, param):
        self.missing -= 1
        if self.missing == 0:
            self.missing = len(self.params)
            self.after_backward()

    def after_backward(self):
        self.free()
        self.reduce()

    def flat_grad(self):
        flat = torch.zeros(self.layout.padded_numel, dtype=self.whole.dtype)
        for p, view in zip(self.params, self.views(flat), strict=True):
            view.copy_(p.grad)
            p.grad = None
        return flat

    def reduce(self):
        mean = torch.empty_like(self.shard)
        start_reduce_scatter(mean, self.flat_grad()).wait()
        self.shard.grad = mean / self.n


@mutant("shard_unit", fails=(ONE_PROCESS, MEAN, HOLDS, ONE_UNIT, TRAFFIC))
def replicated(module):
    """Data parallel with a slice for show: all parameters stay on every rank, and stay old."""

    class Replica(Unit):
        def gather(self):
            pass

        def free(self):
            pass

        def reduce(self):
            flat = self.flat_grad() / self.n
            dist.all_reduce(flat)
            self.shard.grad = self.own(flat).clone()

    return Replica(module).shard


@mutant("shard_unit", fails=(HOLDS, ONE_UNIT))
def keeps_a_full_copy(module):
    """Does everything right, with a full copy of the parameters beside the shard."""
    module.backup = [p.detach().clone() for p in module.parameters()]
    return Unit(module).shard


@mutant("shard_unit", fails=(HOLDS, ONE_UNIT))
def makes_new_tensors(module):
    """Gathers into new tensors and drops them: the graph holds what it has saved."""

    class New(Unit):
        def gather(self):
            self.whole = torch.zeros(self.layout.padded_numel, dtype=self.shard.dtype)
            self.own(self.whole).copy_(self.shard.detach())
            start_all_gather(self.whole).wait()
            for p, view in zip(self.params, self.views(self.whole), strict=True):
                p.data = view

        def free(self):
            self.whole = None
            for p in self.params:
                p.data = torch.empty(0, dtype=p.dtype).expand(0)

        def reduce(self):
            flat = torch.zeros(self.layout.padded_numel, dtype=self.shard.dtype)
            grads = torch.cat([p.grad.flatten() for p in self.params])
            flat[: grads.numel()] = grads
            for p in self.params:
                p.grad = None
            mean = torch.empty_like(self.shard)
            start_reduce_scatter(mean, flat).wait()
            self.shard.grad = mean / self.n

        def views(self, flat):
            if not hasattr(self, "shapes"):
                self.shapes = [torch.empty(p.shape, device="meta") for p in self.params]
            return unflatten(flat[: self.layout.offsets[-1]], self.shapes)

    return New(module).shard


@mutant("shard_unit", fails=TRAFFIC)
def all_reduces(module):
    """All-reduces the whole gradient and keeps its slice: twice the bytes of a reduce-scatter."""

    class AllReduce(Unit):
        def reduce(self):
            flat = self.flat_grad()
            dist.all_reduce(flat)
            self.shard.grad = self.own(flat) / self.n

    return AllReduce(module).shard


@mutant("shard_unit", fails=(HOLDS, ONE_UNIT))
def never_frees_after_backward(module):
    """The gather for backward stays until the next forward has used it."""

    class Stays(Unit):
        def after_backward(self):
            self.reduce()

    return Stays(module).shard


@mutant("shard_unit", fails=(SLICE, ONE_PROCESS, MEAN))
def another_slice(module):
    """Counts slices from the end in the gather and the reduction, and sums without dividing."""

    class Sum(Unit):
        def own(self, flat):
            return flat.chunk(self.n)[self.rank - 1]

        def reduce(self):
            total = torch.empty_like(self.shard)
            start_reduce_scatter(total, self.flat_grad()).wait()
            self.shard.grad = total

    return Sum(module).shard


class RightPrefetch:
    """The right one, from which the wrong ones differ in one thing."""

    def __init__(self, units):
        self.units = units

    def begin(self, i):
        if 0 <= i < len(self.units) and not self.units[i].begun:
            self.units[i].begin()

    def use(self, i, following):
        self.begin(i)
        self.begin(following)
        self.units[i].wait()

    def before_forward(self, i):
        self.use(i, i + 1)

    def after_forward(self, i):
        self.units[i].free()

    def before_backward(self, i):
        self.use(i, i - 1)

    def after_backward(self, i):
        self.units[i].free()


@mutant("Prefetch", fails=AHEAD)
class NoneAhead(RightPrefetch):
    """Gathers a unit when it is needed."""

    def use(self, i, following):
        self.begin(i)
        self.units[i].wait()


@mutant("Prefetch", fails=NO_WAIT)
class WaitsAtOnce(RightPrefetch):
    """Begins the next gather in time, and waits for it before this unit computes."""

    def use(self, i, following):
        super().use(i, following)
        if 0 <= following < len(self.units):
            self.units[following].wait()


@mutant("Prefetch", fails=ONE_AHEAD)
class AllAhead(RightPrefetch):
    """Begins all gathers of a pass at once: the whole model is there."""

    def use(self, i, following):
        for j in range(i, len(self.units)) if following > i else range(i, -1, -1):
            self.begin(j)
        self.units[i].wait()


@mutant("Prefetch", fails=(NOW, AHEAD, ONE_AHEAD, NOTHING_LEFT, ONCE))
class ForwardOnly(RightPrefetch):
    """In backward, too, it begins unit i + 1, which has been used and freed just before."""

    def before_backward(self, i):
        self.use(i, i + 1)


@mutant("Prefetch", fails=(NOW, AHEAD, ONE_AHEAD, NOTHING_LEFT))
class KeepsForBackward(RightPrefetch):
    """Frees after backward alone; an evaluation has none, and what it gathered is used again."""

    def after_forward(self, i):
        pass

    def after_backward(self, i):
        if i:
            self.units[i].free()


@mutant("Prefetch", fails=(READY, NOW))
class ForgetsToWait(RightPrefetch):
    """Begins everything in time, and waits for nothing but the first."""

    def use(self, i, following):
        self.begin(i)
        self.begin(following)


def moments(numels, n, ahead, reshard):
    """What is whole at each moment of a step; in backward with the unit's gradient."""
    wholes = [n * -(-numel // n) for numel in numels]
    for i in range(len(numels)):
        yield "forward", i, sum(wholes[(i if reshard else 0) : i + ahead + 1])
    for i in range(len(numels)):
        yield "backward", i, sum(wholes[(max(i - ahead, 0) if reshard else 0) : i + 1]) + wholes[i]


def shards_of(numels, n):
    return [-(-numel // n) for numel in numels]


@mutant("predict_peak", fails=(EXACT, NEAR))
def forgets_gradients(numels, n, ahead, reshard_after_forward, element_nbytes):
    """Parameters alone."""
    shards = shards_of(numels, n)
    wholes = [n * shard for shard in shards]
    if not reshard_after_forward:
        return element_nbytes * (sum(shards) + sum(wholes))
    most = max(sum(wholes[i : i + ahead + 1]) for i in range(len(numels)))
    return element_nbytes * (sum(shards) + most)


@mutant("predict_peak", fails=(EXACT, NEAR))
def largest_unit(numels, n, ahead, reshard_after_forward, element_nbytes):
    """As if every unit were as large as the largest."""
    shards = shards_of(numels, n)
    whole = n * max(shards)
    count = min(ahead + 1, len(numels)) if reshard_after_forward else len(numels)
    return element_nbytes * (2 * sum(shards) + (count + 1) * whole)


@mutant("predict_peak", fails=(EXACT, NEAR))
def always_resharded(numels, n, ahead, reshard_after_forward, element_nbytes):
    """Does not look at reshard_after_forward."""
    shards = shards_of(numels, n)
    most = 0
    for kind, i, held in moments(numels, n, ahead, True):
        most = max(most, held + (sum(shards[i + 1 :]) if kind == "backward" else 0))
    return element_nbytes * (sum(shards) + most)


@mutant("predict_peak", fails=EXACT)
def without_padding(numels, n, ahead, reshard_after_forward, element_nbytes):
    """Shares of numel / n: near, but a shard is a whole number of elements."""
    most = 0.0
    for kind, i, held in moments(numels, 1, ahead, reshard_after_forward):
        most = max(most, held + (sum(numels[i + 1 :]) / n if kind == "backward" else 0))
    return round(element_nbytes * (sum(numels) / n + most))


@mutant("predict_peak", fails=(EXACT, NEAR))
def forward_only(numels, n, ahead, reshard_after_forward, element_nbytes):
    """The worst moment of the forward, with a gradient added."""
    shards = shards_of(numels, n)
    held = [
        (held, i)
        for kind, i, held in moments(numels, n, ahead, reshard_after_forward)
        if kind == "forward"
    ]
    most, i = max(held)
    return element_nbytes * (sum(shards) + most + shards[i])
