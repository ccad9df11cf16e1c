"""Wrong solutions of lesson 09: states that are not sharded, norms of a part, padding in files."""

import torch
import torch.distributed as dist
from torch import nn

from pdt.comm.started import start_all_gather, start_reduce_scatter
from pdt.flat import ShardLayout, unflatten
from tests.mutants import mutant

AS_ONE = "updates as one optimizer for all would"
ANY_SIZE = "takes any number of elements"
GROUPS = "gives each group its own settings"
OF_A_SHARD = "holds the states of its shard, and nothing else whole"
TWO_PARTS = "sends 2(n-1)/n of the parameters in a step"
NORM = "returns the norm of the whole gradient"
ORDERS = "knows norms of any order"
COPIES = "counts once what all ranks hold"
EMPTY = "serves ranks that have no shard"
NOT_FINITE = "shows all ranks what is not finite on one"
SCALES = "scales by max_norm / norm, and never up"
ONE_CALL = "agrees by one small call"
WHOLE = "saves one whole tensor for each parameter, in its shape"
STEPS = "keeps the count of steps"
LOADS = "loads this rank's shard, padded with zeros"
OWN_MEMORY = "saves and loads tensors that own their memory"
ONCE = "sends each state once to save, and nothing to load"


class Bucket:
    """A group's parameters in one flat buffer, and this rank's shard."""

    def __init__(self, params):
        self.params = list(params)
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.numel = sum(p.numel() for p in self.params)
        self.flat = self.flatten(self.params)
        for p, view in zip(self.params, self.views(self.flat), strict=True):
            p.data = view
        self.shard = nn.Parameter(self.flat.chunk(self.n)[self.rank])

    def views(self, flat):
        return unflatten(flat[: self.numel], self.params)

    @torch.no_grad()
    def flatten(self, tensors):
        layout = ShardLayout((self.numel,), self.n)
        flat = self.params[0].new_zeros(layout.padded_numel)
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            view.copy_(tensor)
        return flat

    def reduce(self):
        self.shard.grad = torch.empty_like(self.shard)
        start_reduce_scatter(self.shard.grad, self.flatten([p.grad for p in self.params])).wait()
        self.shard.grad /= self.n


class Right:
    """From which the wrong ones differ in one thing."""

    def __init__(self, groups, optimizer_class, **defaults):
        self.buckets = [Bucket(group["params"]) for group in groups]
        pairs = zip(groups, self.buckets, strict=True)
        self.optim = optimizer_class([{**g, "params": [b.shard]} for g, b in pairs], **defaults)

    def reduce(self, bucket):
        bucket.reduce()

    @torch.no_grad()
    def step(self):
        for bucket in self.buckets:
            self.reduce(bucket)
        self.optim.step()
        for bucket in self.buckets:
            bucket.shard.grad = None
            start_all_gather(bucket.flat).wait()


@mutant("PartitionedOptimizer", fails=OF_A_SHARD)
class Unsharded:
    """All-reduces everything and steps everywhere: right numbers, and every rank holds all."""

    def __init__(self, groups, optimizer_class, **defaults):
        self.params = [p for group in groups for p in group["params"]]
        self.optim = optimizer_class(groups, **defaults)

    def step(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.optim.step()


@mutant("PartitionedOptimizer", fails=(OF_A_SHARD, TWO_PARTS))
class KeepsTheFullStatesToo(Right):
    """Shards the states, then gathers them, so that each rank is able to save all."""

    def step(self):
        super().step()
        self.whole = []
        for bucket in self.buckets:
            for value in self.optim.state[bucket.shard].values():
                if isinstance(value, torch.Tensor) and value.dim():
                    flat = torch.zeros_like(bucket.flat)
                    flat.chunk(bucket.n)[bucket.rank].copy_(value)
                    start_all_gather(flat).wait()
                    self.whole.append(flat)


@mutant("PartitionedOptimizer", fails=TWO_PARTS)
class AllReducesFirst(Right):
    """Keeps DDP's all-reduce, and throws n - 1 of n means away."""

    def reduce(self, bucket):
        flat_grad = bucket.flatten([p.grad for p in bucket.params])
        dist.all_reduce(flat_grad)
        bucket.shard.grad = flat_grad.chunk(bucket.n)[bucket.rank] / bucket.n


@mutant("PartitionedOptimizer", fails=GROUPS)
class OneGroupForAll(Right):
    """One flat buffer of everything; the groups' own settings are lost."""

    def __init__(self, groups, optimizer_class, **defaults):
        params = [p for group in groups for p in group["params"]]
        super().__init__([{"params": params}], optimizer_class, **defaults)


@mutant("PartitionedOptimizer", fails=(ANY_SIZE, GROUPS, OF_A_SHARD))
class DropsTheRest(Right):
    """What does not divide evenly belongs to nobody, and is never updated."""

    def __init__(self, groups, optimizer_class, **defaults):
        super().__init__(groups, optimizer_class, **defaults)
        for bucket in self.buckets:
            numel = bucket.numel // bucket.n * bucket.n
            bucket.flat = bucket.flat[:numel]
            start = bucket.rank * (numel // bucket.n)
            bucket.shard.data = bucket.flat[start : start + numel // bucket.n]

    def reduce(self, bucket):
        flat_grad = bucket.flatten([p.grad for p in bucket.params])[: bucket.flat.numel()].clone()
        bucket.shard.grad = torch.empty_like(bucket.shard)
        start_reduce_scatter(bucket.shard.grad, flat_grad).wait()
        bucket.shard.grad /= bucket.n


@mutant("PartitionedOptimizer", fails=(AS_ONE, ANY_SIZE, GROUPS))
class Sums(Right):
    """The sum over ranks where their mean is asked for."""

    def reduce(self, bucket):
        bucket.reduce()
        bucket.shard.grad *= bucket.n


def norm_of(tensors, norm_type):
    flat = torch.cat([torch.zeros(1), *(t.flatten() for t in tensors)])
    return torch.linalg.vector_norm(flat, norm_type)


def norms_of_ranks(tensors, norm_type):
    own = norm_of(tensors, norm_type)
    norms = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, own)
    return norms


def scale(tensors, max_norm, norm):
    for tensor in tensors:
        tensor.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@mutant("clip_sharded_", fails=(NORM, ORDERS, COPIES, EMPTY, NOT_FINITE))
def local(shards, replicated, max_norm, norm_type):
    """Each rank looks at its own shards alone."""
    tensors = [*shards, *replicated]
    return scale(tensors, max_norm, norm_of(tensors, norm_type))


@mutant("clip_sharded_", fails=(NORM, ORDERS, COPIES))
def adds_norms(shards, replicated, max_norm, norm_type):
    """Adds norms, where their powers add up."""
    norm = torch.stack(norms_of_ranks(shards, norm_type)).sum() + norm_of(replicated, norm_type)
    return scale([*shards, *replicated], max_norm, norm)


@mutant("clip_sharded_", fails=COPIES)
def counts_replicas(shards, replicated, max_norm, norm_type):
    """What all ranks hold is counted n times."""
    tensors = [*shards, *replicated]
    return scale(tensors, max_norm, norm_of(norms_of_ranks(tensors, norm_type), norm_type))


@mutant("clip_sharded_", fails=(ORDERS, COPIES, EMPTY))
def always_squares(shards, replicated, max_norm, norm_type):
    """The order 2, whatever was asked for."""
    norms = [*norms_of_ranks(shards, 2), norm_of(replicated, 2)]
    return scale([*shards, *replicated], max_norm, norm_of(norms, 2))


@mutant("clip_sharded_", fails=(ONE_CALL, NOT_FINITE))
def sums_or_maximum(shards, replicated, max_norm, norm_type):
    """Numbers from all ranks, but each rank drops what is nan, and asks in two calls."""
    own = norm_of(shards, norm_type).nan_to_num(0.0)
    highest = own.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    powers = own.pow(norm_type if norm_type < torch.inf else 1)
    dist.all_reduce(powers)
    norm = highest if norm_type == torch.inf else powers.pow(1 / norm_type)
    norm = norm_of([norm, norm_of(replicated, norm_type)], norm_type)
    return scale([*shards, *replicated], max_norm, norm)


@mutant("clip_sharded_", fails=SCALES)
def scales_up(shards, replicated, max_norm, norm_type):
    """Brings small gradients up to max_norm, too."""
    norms = [*norms_of_ranks(shards, norm_type), norm_of(replicated, norm_type)]
    norm = norm_of(norms, norm_type)
    for tensor in [*shards, *replicated]:
        tensor.mul_(max_norm / (norm + 1e-6))
    return norm


class RightStates:
    """From which the wrong ones differ in one thing."""

    def __init__(self, shapes):
        self.like = [torch.empty(shape) for shape in shapes]
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.layout = ShardLayout(tuple(t.numel() for t in self.like), self.n)

    def new_flat(self):
        flat = torch.zeros(self.layout.padded_numel)
        return flat, unflatten(flat[: self.layout.offsets[-1]], self.like)

    def gather(self, flat, shard):
        flat.chunk(self.n)[self.rank].copy_(shard)
        start_all_gather(flat).wait()

    def own(self, tensor):
        return tensor.clone()

    def cut(self, flat, views):
        return [self.own(view) for view in views]

    def part(self, flat):
        return flat.chunk(self.n)[self.rank].clone()

    def save(self, state):
        saved = [{"step": state["step"].clone()} for _ in self.like]
        for name in sorted(state.keys() - {"step"}):
            flat, views = self.new_flat()
            self.gather(flat, state[name])
            for of_param, tensor in zip(saved, self.cut(flat, views), strict=True):
                of_param[name] = tensor
        return saved

    def load(self, saved):
        state = {"step": saved[0]["step"].clone()}
        for name in sorted(saved[0].keys() - {"step"}):
            flat, views = self.new_flat()
            for of_param, view in zip(saved, views, strict=True):
                view.copy_(of_param[name])
            state[name] = self.part(flat)
        return state


@mutant("LogicalStates", fails=WHOLE)
class BakesPaddingIn(RightStates):
    """The last parameter takes along what is behind it."""

    def cut(self, flat, views):
        last = flat[self.layout.offsets[-2] :].clone()
        padded = self.layout.padded_numel > self.layout.offsets[-1]
        return [*(v.clone() for v in views[:-1]), last if padded else views[-1].clone()]


@mutant("LogicalStates", fails=OWN_MEMORY)
class SavesViews(RightStates):
    """A file holds each view's whole buffer."""

    def own(self, tensor):
        return tensor


@mutant("LogicalStates", fails=OWN_MEMORY)
class LoadsAView(RightStates):
    """A view of the whole state keeps it alive: nothing is saved by sharding."""

    def part(self, flat):
        return flat.chunk(self.n)[self.rank]


@mutant("LogicalStates", fails=LOADS)
class LoadsWithoutPadding(RightStates):
    """The last ranks' shards are as long as what is left for them."""

    def part(self, flat):
        first, last = (self.layout.shard_numel * r for r in (self.rank, self.rank + 1))
        return flat[first : min(last, self.layout.offsets[-1])].clone()


@mutant("LogicalStates", fails=ONCE)
class AllReduces(RightStates):
    """A sum with zeros: twice the traffic."""

    def gather(self, flat, shard):
        flat.chunk(self.n)[self.rank].copy_(shard)
        dist.all_reduce(flat)


@mutant("LogicalStates", fails=STEPS)
class BeginsAnew(RightStates):
    """The count of steps starts again at zero, and with it AdamW's bias correction."""

    def load(self, saved):
        return super().load(saved) | {"step": torch.tensor(0.0)}
