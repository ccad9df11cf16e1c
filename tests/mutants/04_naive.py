"""Wrong solutions of lesson 04: samples dealt twice, weights averaged, means of means."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from pdt.flat import flatten, unflatten
from tests.mutants import mutant

ONCE = "puts each sample on exactly one rank"
EVENLY = "deals as many to each rank, up to one"
ANEW = "deals anew in each epoch"
MEAN = "leaves the mean of all ranks' gradients"
OVERFLOW = "divides before it adds"
NONE = "leaves None where no rank has a gradient"
CALLS = "makes one all-reduce for each dtype"
BYTES = "sends each gradient once, in its dtype"
WEIGHTS = "leaves the weights as they were"
LOSS = "returns the mean loss over all tokens of all ranks"
GRADIENT = "leaves that loss's gradient on every rank"
WINDOW = "communicates once for the whole window"


def shuffled(num_samples, epoch):
    """The same order on all ranks, another in each epoch."""
    generator = torch.Generator().manual_seed(epoch)
    return torch.randperm(num_samples, generator=generator).tolist()


@mutant("shard", fails=(ONCE, ANEW))
def whole_data_set(num_samples, rank, world_size, epoch):
    """Every rank gets everything: the right gradients, and no speed-up."""
    return shuffled(num_samples, epoch)


@mutant("shard", fails=ONCE)
def repeats_to_divide(num_samples, rank, world_size, epoch):
    """As torch's sampler: the first samples again, until the number divides."""
    order = shuffled(num_samples, epoch)
    order += order[: -num_samples % world_size]
    return order[rank::world_size]


@mutant("shard", fails=ONCE)
def drops_the_rest(num_samples, rank, world_size, epoch):
    """What does not divide is left out."""
    order = shuffled(num_samples, epoch)
    return order[: num_samples - num_samples % world_size][rank::world_size]


@mutant("shard", fails=ONCE)
def each_its_own_order(num_samples, rank, world_size, epoch):
    """A shuffle by the rank's own source of chance: shares overlap."""
    return torch.randperm(num_samples).tolist()[rank::world_size]


@mutant("shard", fails=EVENLY)
def blocks_rounded_up(num_samples, rank, world_size, epoch):
    """Blocks of the size rounded up: the last rank gets what is left, or nothing."""
    numel = -(-num_samples // world_size)
    return shuffled(num_samples, epoch)[rank * numel : (rank + 1) * numel]


@mutant("shard", fails=ANEW)
def forgets_the_epoch(num_samples, rank, world_size, epoch):
    """The same samples in the same order, again and again."""
    return shuffled(num_samples, 0)[rank::world_size]


def trained(model):
    """The parameters that learn."""
    return [p for p in model.parameters() if p.requires_grad]


def presence(params):
    """By parameter: how many ranks have its gradient."""
    flags = torch.tensor([p.grad is not None for p in params]).int()
    dist.all_reduce(flags)
    return flags.tolist()


def by_dtype(params):
    """The parameters of each dtype."""
    dtypes = dict.fromkeys(p.dtype for p in params)
    return [[p for p in params if p.dtype == dtype] for dtype in dtypes]


def filled(params):
    """Gradients, zeros where this rank has none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in params]


def give(params, grads):
    """Write gradients back."""
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()


@mutant("flat_sync", fails=CALLS)
def one_by_one(model):
    """The right mean, by a call for each parameter."""
    params = trained(model)
    used = [p for p, count in zip(params, presence(params), strict=True) if count]
    for p, grad in zip(used, filled(used), strict=True):
        grad /= dist.get_world_size()
        dist.all_reduce(grad)
        p.grad = grad


@mutant("flat_sync", fails=(MEAN, WEIGHTS))
def averages_weights(model):
    """Each rank keeps its own gradient, and the weights are averaged."""
    for params in by_dtype(trained(model)):
        flat = flatten([p.detach() for p in params]) / dist.get_world_size()
        dist.all_reduce(flat)
        for p, part in zip(params, unflatten(flat, params), strict=True):
            p.data.copy_(part)


@mutant("flat_sync", fails=MEAN)
def mean_of_those_present(model):
    """Divides by the number of ranks that have a gradient, not by all."""
    params = trained(model)
    counts = dict(zip(params, presence(params), strict=True))
    for some in by_dtype([p for p in params if counts[p]]):
        flat = flatten([g / counts[p] for p, g in zip(some, filled(some), strict=True)])
        dist.all_reduce(flat)
        give(some, unflatten(flat, some))


@mutant("flat_sync", fails=OVERFLOW)
def adds_first(model):
    """The sum in float16 is infinite, and half of that still is."""
    params = trained(model)
    used = [p for p, count in zip(params, presence(params), strict=True) if count]
    for some in by_dtype(used):
        flat = flatten(filled(some))
        dist.all_reduce(flat)
        give(some, unflatten(flat / dist.get_world_size(), some))


@mutant("flat_sync", fails=NONE)
def zeros_for_all(model):
    """A layer that nobody used gets zeros, and weight decay then moves it."""
    for some in by_dtype(trained(model)):
        flat = flatten(filled(some)) / dist.get_world_size()
        dist.all_reduce(flat)
        give(some, unflatten(flat, some))


@mutant("flat_sync", fails=BYTES)
def all_in_float64(model):
    """One call for all dtypes: everything travels in the widest."""
    params = trained(model)
    used = [p for p, count in zip(params, presence(params), strict=True) if count]
    flat = flatten([grad.double() for grad in filled(used)]) / dist.get_world_size()
    dist.all_reduce(flat)
    give(used, [v.to(p.dtype) for v, p in zip(unflatten(flat, used), used, strict=True)])


def loss_sum(model, tokens, targets):
    """The sum of the losses of all tokens that count."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")


def valid(batches):
    """How many tokens count."""
    return sum(int((targets != -100).sum()) for _, targets in batches)


def summed(*numbers):
    """The sums over the ranks."""
    together = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(together)
    return together.tolist()


def add_up(model, factor=1.0):
    """Every rank holds the sum of all gradients, times a factor."""
    params = trained(model)
    flat = flatten(filled(params)) * factor
    dist.all_reduce(flat)
    give(params, unflatten(flat, params))


def backward(model, batches, denominators):
    """Accumulate gradients; the sum of the losses, each over its denominator."""
    total = 0.0
    for (tokens, targets), denominator in zip(batches, denominators, strict=True):
        loss = loss_sum(model, tokens, targets) / denominator
        loss.backward()
        total += loss.item()
    return total


@mutant("token_sync", fails=(LOSS, GRADIENT))
def mean_of_rank_means(model, batches):
    """Each rank's mean over its own tokens, then the mean over ranks."""
    n = dist.get_world_size()
    loss = backward(model, batches, [max(1, valid(batches))] * len(batches))
    add_up(model, 1 / n)
    return summed(loss / n)[0]


@mutant("token_sync", fails=(LOSS, GRADIENT))
def mean_of_micro_batch_means(model, batches):
    """A mean for each micro-batch; then the mean of all these means."""
    (count,) = summed(len(batches))
    loss = backward(model, batches, [max(1, valid([batch])) * count for batch in batches])
    add_up(model)
    return summed(loss)[0]


@mutant("token_sync", fails=GRADIENT)
def divides_twice(model, batches):
    """By the tokens of all ranks, and once more by the ranks."""
    (count,) = summed(valid(batches))
    loss = backward(model, batches, [count] * len(batches))
    add_up(model, 1 / dist.get_world_size())
    return summed(loss)[0]


@mutant("token_sync", fails=LOSS)
def its_own_loss(model, batches):
    """The gradient is right; the loss is that of this rank's tokens alone."""
    (count,) = summed(valid(batches))
    loss = backward(model, batches, [count] * len(batches))
    add_up(model)
    return loss


@mutant("token_sync", fails=(LOSS, GRADIENT))
def counts_padding(model, batches):
    """Targets that are ignored are counted all the same."""
    (count,) = summed(sum(targets.numel() for _, targets in batches))
    loss = backward(model, batches, [count] * len(batches))
    add_up(model)
    return summed(loss)[0]


@mutant("token_sync", fails=WINDOW)
def after_each_micro_batch(model, batches):
    """The right sum, but gradients travel once for each micro-batch of the busiest rank."""
    count, total, rounds = summed(valid(batches))[0], 0.0, torch.tensor(len(batches))
    dist.all_reduce(rounds, op=dist.ReduceOp.MAX)
    kept = [torch.zeros_like(p) for p in trained(model)]
    for i in range(int(rounds)):
        model.zero_grad()
        total += backward(model, batches[i : i + 1], [count] * len(batches[i : i + 1]))
        add_up(model)
        torch._foreach_add_(kept, [p.grad for p in trained(model)])
    give(trained(model), kept)
    return summed(total)[0]
