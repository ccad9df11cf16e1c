"""Wrong solutions of lesson 08: rests that get lost, ranks that part, sums in too few bits."""

import torch
import torch.distributed as dist

from tests.mutants import mutant

LARGEST = "adds up each rank's k largest gradients"
LONG = "loses nothing in the long run"
EACH = "keeps a rest for each bucket"
BYTES = "sends k values and k indices of 4 bytes"
TOGETHER = "steps when all gradients of all ranks are finite, and only then"
RULE = "halves the scale on overflow and doubles it after interval good steps"
UNSCALED = "unscales by the scale that the loss had"
CALL = "agrees by one small call"
SUM = "holds the sum, added in fp32 and rounded once"
ANY = "takes any number of elements"
TRAFFIC = "sends no more than an all-reduce of bf16"


def gathered(tensor):
    """A place for every rank's tensor, and the work that fills it."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    return parts, dist.all_gather(parts, tensor, async_op=True)


def summed(flat, where, what):
    """Afterwards flat holds the sum of what each rank chose."""
    all_where, work = gathered(where)
    yield work
    all_what, work = gathered(what)
    yield work
    flat.zero_()
    for indices, values in zip(all_where, all_what, strict=True):
        flat.index_add_(0, indices, values)


@mutant("error_feedback", fails=(LONG, EACH))
def no_feedback(k):
    """What is not sent is lost."""

    def hook(bucket, group):
        where = bucket.flat.abs().topk(k).indices.int()
        yield from summed(bucket.flat, where, bucket.flat[where])

    return hook


@mutant("error_feedback", fails=EACH)
def one_rest_for_all(k):
    """Right while there is one bucket."""
    kept = [0]

    def hook(bucket, group):
        whole = bucket.flat + kept[0]
        where = whole.abs().topk(k).indices.int()
        kept[0] = whole.index_fill(0, where.long(), 0)
        yield from summed(bucket.flat, where, whole[where])

    return hook


@mutant("error_feedback", fails=BYTES)
def dense(k):
    """Zeros cost as much as other numbers."""
    kept = {}

    def hook(bucket, group):
        whole = bucket.flat + kept.get(bucket.index, 0)
        kept[bucket.index] = whole.index_fill(0, whole.abs().topk(k).indices, 0)
        bucket.flat.copy_(whole - kept[bucket.index])
        yield dist.all_reduce(bucket.flat, async_op=True)

    return hook


@mutant("error_feedback", fails=BYTES)
def wide_indices(k):
    """torch's indices have 8 bytes."""
    kept = {}

    def hook(bucket, group):
        whole = bucket.flat + kept.get(bucket.index, 0)
        where = whole.abs().topk(k).indices
        kept[bucket.index] = whole.index_fill(0, where, 0)
        yield from summed(bucket.flat, where, whole[where])

    return hook


@mutant("error_feedback", fails=LARGEST)
def without_abs(k):
    """Large negative gradients wait until nothing positive is left."""
    kept = {}

    def hook(bucket, group):
        whole = bucket.flat + kept.get(bucket.index, 0)
        scores = torch.where(whole == 0, -torch.inf, whole)
        where = scores.topk(k).indices.int()
        kept[bucket.index] = whole.index_fill(0, where.long(), 0)
        yield from summed(bucket.flat, where, whole[where])

    return hook


@mutant("error_feedback", fails=(LARGEST, LONG, EACH))
def the_last_rank_wins(k):
    """Where ranks chose the same position, one of them is written over."""
    kept = {}

    def hook(bucket, group):
        whole = bucket.flat + kept.get(bucket.index, 0)
        where = whole.abs().topk(k).indices.int()
        kept[bucket.index] = whole.index_fill(0, where.long(), 0)
        what = whole[where]
        all_where, work = gathered(where)
        yield work
        all_what, work = gathered(what)
        yield work
        bucket.flat.zero_()
        for indices, values in zip(all_where, all_what, strict=True):
            bucket.flat[indices] = values

    return hook


def largest(flag):
    """The largest of all ranks' flags, as a bool."""
    bad = torch.tensor(float(flag))
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return bad.item() > 0


def is_bad(grads):
    return not all(grad.isfinite().all() for grad in grads)


def next_state(step, scale, good, interval):
    """The right rule."""
    good = good + 1 if step else 0
    if not step:
        return step, scale / 2, 0
    return (step, 2 * scale, 0) if good == interval else (step, scale, good)


def unscaled(grads, scale):
    for grad in grads:
        grad /= scale


@mutant("loss_scale", fails=TOGETHER)
def decides_alone(grads, scale, good, interval):
    """One rank skips, the others step, and the models part."""
    unscaled(grads, scale)
    return next_state(not is_bad(grads), scale, good, interval)


@mutant("loss_scale", fails=TOGETHER)
def looks_for_inf(grads, scale, good, interval):
    """NaN and -inf are no inf."""
    bad = largest(any((grad == torch.inf).any() for grad in grads))
    unscaled(grads, scale)
    return next_state(not bad, scale, good, interval)


@mutant("loss_scale", fails=TOGETHER)
def sums_first(grads, scale, good, interval):
    """A sum of finite gradients may overflow by itself."""
    total = sum(grad.sum() for grad in grads)
    dist.all_reduce(total)
    unscaled(grads, scale)
    return next_state(total.isfinite().item(), scale, good, interval)


@mutant("loss_scale", fails=RULE)
def counts_on(grads, scale, good, interval):
    """Good steps before an overflow count as well."""
    bad = largest(is_bad(grads))
    unscaled(grads, scale)
    if bad:
        return False, scale / 2, good
    good += 1
    return (True, 2 * scale, 0) if good == interval else (True, scale, good)


@mutant("loss_scale", fails=UNSCALED)
def with_the_next_scale(grads, scale, good, interval):
    """The loss had the old one."""
    state = next_state(not largest(is_bad(grads)), scale, good, interval)
    unscaled(grads, state[1])
    return state


@mutant("loss_scale", fails=CALL)
def asks_for_each(grads, scale, good, interval):
    """A call for each gradient."""
    bad = [largest(is_bad([grad])) for grad in grads]
    unscaled(grads, scale)
    return next_state(not any(bad), scale, good, interval)


@mutant("fp32_sum", fails=(SUM, ANY))
def all_reduce_of_bf16(tensor):
    """Rounded at each hop."""
    dist.all_reduce(tensor)


@mutant("fp32_sum", fails=TRAFFIC)
def all_reduce_of_fp32(tensor):
    """Right, at twice the bytes."""
    wide = tensor.float()
    dist.all_reduce(wide)
    tensor.copy_(wide)


@mutant("fp32_sum", fails=TRAFFIC)
def everything_to_all(tensor):
    """Right, but a rank's traffic grows with the number of ranks."""
    parts, work = gathered(tensor)
    work.wait()
    tensor.copy_(torch.stack(parts).sum(0, dtype=torch.float32))


def by_parts(flat, add):
    """All-to-all, `add` of the n parts that arrived, all-gather; flat has n equal parts."""
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat)
    parts, work = gathered(add(received.view(dist.get_world_size(), -1)).bfloat16())
    work.wait()
    flat.copy_(torch.cat(parts))


@mutant("fp32_sum", fails=ANY)
def drops_the_rest(tensor):
    """Elements that do not divide evenly among the ranks are left as they were."""
    n, flat = dist.get_world_size(), tensor.view(-1)
    whole = flat[: flat.numel() // n * n]
    by_parts(whole, lambda parts: parts.sum(0, dtype=torch.float32))


@mutant("fp32_sum", fails=(SUM, ANY))
def adds_in_bf16(tensor):
    """The right way round, and rounded at each addition all the same."""

    def add(parts):
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    n, flat = dist.get_world_size(), tensor.view(-1)
    padded = flat.new_zeros(-(-flat.numel() // n) * n)
    padded[: flat.numel()] = flat
    by_parts(padded, add)
    flat.copy_(padded[: flat.numel()])
