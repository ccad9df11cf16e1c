"""Wrong solutions of lesson 03: bad fits, laws that lack a term, crowded ports."""

import math

import torch
import torch.distributed as dist

from pdt.comm import cost
from tests.mutants import mutant

RETURNS = "comes to its end on every rank"
LATENCY = "finds the latency within 15 %"
BANDWIDTH = "finds the bandwidth within 15 %"
SIGN = "never finds a negative constant"
BEST = "finds the best number of buckets"
MODEL = "predicts the step's time by the model"
ON_WIRE = "predicts what the emulated wire takes, within 25 %"
SUM = "every rank ends with the sum of all tensors"
ACROSS = "sends 2(m-1)/m of one shard to other nodes"
INSIDE = "sends 2(r-1)/r of the tensor inside its node"
CALLS = "makes few calls"


def line(nbytes, seconds, weights):
    """Latency and seconds per byte by weighted least squares, whatever their signs."""
    rows = torch.tensor([[1.0, float(s)] for s in nbytes], dtype=torch.float64)
    times = torch.tensor(seconds, dtype=torch.float64)
    w = torch.tensor(weights, dtype=torch.float64)
    scale = rows.mul(w[:, None]).norm(dim=0)  # columns of one length: the solver is exact
    solution = torch.linalg.lstsq(rows * w[:, None] / scale, (times * w)[:, None]).solution
    latency_s, per_byte = (solution.flatten() / scale).tolist()
    return latency_s, per_byte


def relative(nbytes, seconds):
    """The right line but for the sign of the latency."""
    return line(nbytes, seconds, [1 / t for t in seconds])


@mutant("fit_link", fails=LATENCY)
def absolute_error(nbytes, seconds):
    """The large sizes alone decide, and the latency is what they leave over."""
    latency_s, per_byte = line(nbytes, seconds, [1.0] * len(seconds))
    return max(latency_s, 0.0), 1 / per_byte


@mutant("fit_link", fails=BANDWIDTH)
def seconds_per_byte(nbytes, seconds):
    """The slope, not one over it."""
    latency_s, per_byte = relative(nbytes, seconds)
    return max(latency_s, 0.0), per_byte


@mutant("fit_link", fails=(LATENCY, BANDWIDTH))
def first_and_last(nbytes, seconds):
    """Takes for granted that the sizes are sorted."""
    return seconds[0], nbytes[-1] / seconds[-1]


@mutant("fit_link", fails=SIGN)
def below_zero(nbytes, seconds):
    """The best line of all, even when it starts below zero."""
    latency_s, per_byte = relative(nbytes, seconds)
    return latency_s, 1 / per_byte


def step_s(buckets, nbytes, n, link, backward_s):
    """The right model of the step."""
    bucket_s, free_s = cost.ring_all_reduce_s(nbytes / buckets, n, link), 0.0
    for j in range(1, buckets + 1):
        free_s = max(free_s, backward_s * j / buckets) + bucket_s
    return free_s


def fastest(model):
    """The number of buckets for which the model's time is least, and that time."""
    best = min(range(1, 1001), key=model)
    return best, model(best)


@mutant("plan_buckets", fails=BEST)
def all_at_the_end(nbytes, n, link, backward_s):
    """One bucket: nothing is sent before backward has ended."""
    return 1, step_s(1, nbytes, n, link, backward_s)


@mutant("plan_buckets", fails=BEST)
def square_root(nbytes, n, link, backward_s):
    """Right while the wire never rests, and too few buckets when backward takes longer."""
    latency_s = 2 * (n - 1) * link.latency_s
    best = max(1, min(1000, round(math.sqrt(backward_s / latency_s)))) if latency_s else 1
    return best, step_s(best, nbytes, n, link, backward_s)


@mutant("plan_buckets", fails=(BEST, MODEL, ON_WIRE))
def messages_are_free(nbytes, n, link, backward_s):
    """Without latency, more buckets are always better."""
    free = cost.Link(0.0, link.bandwidth)
    return fastest(lambda k: step_s(k, nbytes, n, free, backward_s))


@mutant("plan_buckets", fails=(BEST, MODEL, ON_WIRE))
def one_latency_each(nbytes, n, link, backward_s):
    """A bucket is 2(n-1) messages, one after the other, not one."""
    one = cost.Link(link.latency_s / max(1, 2 * (n - 1)), link.bandwidth)
    return fastest(lambda k: step_s(k, nbytes, n, one, backward_s))


@mutant("plan_buckets", fails=(BEST, MODEL, ON_WIRE))
def hides_everything(nbytes, n, link, backward_s):
    """The longer of compute and communication, as if the first bucket were ready at once."""
    return fastest(
        lambda k: max(backward_s, k * cost.ring_all_reduce_s(nbytes / k, n, link)),
    )


def shard_of(x, group):
    """This rank's part of x, padded with zeros; all parts are as long."""
    r = dist.get_world_size(group)
    numel = -(-x.numel() // r)
    padded = x.new_zeros(r * numel)
    padded[: x.numel()] = x.view(-1)
    return padded, padded.new_empty(numel)


def gathered(x, shard, group):
    """x is put together from the shards of the group."""
    whole = shard.new_empty(shard.numel() * dist.get_world_size(group))
    dist.all_gather(list(whole.split(shard.numel())), shard, group=group)
    x.copy_(whole[: x.numel()].view_as(x))


@mutant("two_level_all_reduce", fails=ACROSS)
def flat_ring(x, inside, across):
    """One ring of all ranks: whole tensors cross, where a shard would do."""
    dist.all_reduce(x)


@mutant("two_level_all_reduce", fails=ACROSS)
def through_leaders(x, inside, across):
    """One rank of each node talks for all, so one port carries the tensor and the others rest."""
    dist.reduce(x, group=inside, group_dst=0)
    if dist.get_rank(inside) == 0:
        dist.all_reduce(x, group=across)
    dist.broadcast(x, group=inside, group_src=0)


@mutant("two_level_all_reduce", fails=INSIDE)
def sums_all_inside(x, inside, across):
    """Every rank gets its node's whole sum, uses a shard of it, and gathers the rest again."""
    dist.all_reduce(x, group=inside)
    padded, shard = shard_of(x, inside)
    start = dist.get_rank(inside) * shard.numel()
    shard.copy_(padded[start : start + shard.numel()])
    dist.all_reduce(shard, group=across)
    gathered(x, shard, inside)


@mutant("two_level_all_reduce", fails=RETURNS)
def two_by_two(x, inside, across):
    """Finds its partners by flipping a bit of the rank: right on two nodes of two ranks."""
    for peer in (dist.get_rank() ^ 1, dist.get_rank() ^ 2):
        arrived = torch.empty_like(x)
        work = dist.isend(x.clone(), peer)
        dist.recv(arrived, peer)
        work.wait()
        x += arrived


@mutant("two_level_all_reduce", fails=SUM)
def drops_the_rest(x, inside, across):
    """Elements that do not divide evenly among the ranks of a node are left as they were."""
    r = dist.get_world_size(inside)
    numel = x.numel() // r
    if numel == 0:
        return
    whole = x.view(-1)[: r * numel]
    shard = x.new_empty(numel)
    dist.reduce_scatter(shard, list(whole.split(numel)), group=inside)
    dist.all_reduce(shard, group=across)
    dist.all_gather(list(whole.split(numel)), shard, group=inside)


@mutant("two_level_all_reduce", fails=CALLS)
def one_call_each(x, inside, across):
    """The right bytes, in one call for each element."""
    padded, shard = shard_of(x, inside)
    dist.reduce_scatter(shard, list(padded.split(shard.numel())), group=inside)
    for element in shard.split(1):
        dist.all_reduce(element, group=across)
    gathered(x, shard, inside)
