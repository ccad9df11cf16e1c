"""Wrong solutions of lesson 07: copies that are not shared, sums that get lost, early looks."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from pdt.segment import Segment
from tests.mutants import mutant

RANK_0S = "holds rank 0's values on every rank"
WRITES = "every rank sees what one rank writes"
KEEPS = "keeps the Parameter objects"
END_TO_END = "lays each parameter once, end to end"
ONE_COPY = "is one copy for all ranks"
NO_NAME = "leaves no name in a file system"
MEAN = "total becomes the mean of all gradients"
ORDER = "adds in the order of ranks"
WHOLE = "is whole on every rank when it returns"
NO_BYTES = "sends no bytes"
AS_ONE = "updates as one optimizer for all would"
SLICES = "each rank updates 1/n of the elements"
BEFORE = "changes nothing before all ranks have come"
AFTER = "returns when all slices are new"


def mapped(numel):
    """A flat tensor (numel,) in rank 0's segment, on every rank."""
    rank = dist.get_rank()
    segment = Segment.create(4 * numel) if rank == 0 else None
    path = [segment.path if rank == 0 else None]
    dist.broadcast_object_list(path, src=0)
    segment = segment or Segment.open(path[0])
    flat = segment.tensor(torch.float32, numel)
    dist.barrier()  # rank 0 keeps it open until all have it
    return flat


def laid_out(params, flat):
    """Each parameter and its place in `flat`."""
    start = 0
    for param in params:
        yield param, flat[start : start + param.numel()].view(param.shape)
        start += param.numel()


def total_of(params):
    return sum(param.numel() for param in params)


@mutant("share_parameters", fails=(WRITES, ONE_COPY))
def replicas(module):
    """A flat copy of its own on every rank, equal at first."""
    params = list(module.parameters())
    flat = torch.cat([param.detach().flatten() for param in params])
    dist.broadcast(flat, src=0)
    for param, place in laid_out(params, flat):
        param.data = place
    return flat


@mutant("share_parameters", fails=RANK_0S)
def all_put_theirs_in(module):
    """The last rank to copy its values in wins."""
    params = list(module.parameters())
    flat = mapped(total_of(params))
    for turn in range(dist.get_world_size()):
        if dist.get_rank() == turn:
            for param, place in laid_out(params, flat):
                place.copy_(param.data)
        dist.barrier()
    for param, place in laid_out(params, flat):
        param.data = place
    return flat


@mutant("share_parameters", fails=END_TO_END)
def tied_twice(module):
    """A tied parameter gets two places, the first of which nobody uses."""
    params = [p for _, p in module.named_parameters(remove_duplicate=False)]
    flat = mapped(total_of(params))
    if dist.get_rank() == 0:
        for param, place in laid_out(params, flat):
            place.copy_(param.data)
    dist.barrier()
    for param, place in laid_out(params, flat):
        param.data = place
    return flat


@mutant("share_parameters", fails=KEEPS)
def new_parameters(module):
    """New Parameter objects: what was tied or frozen, or in an optimizer, still is the old one."""
    params = list(module.parameters())
    flat = mapped(total_of(params))
    new = {}
    for param, place in laid_out(params, flat):
        if dist.get_rank() == 0:
            place.copy_(param.data)
        new[param] = nn.Parameter(place, requires_grad=param.requires_grad)
    dist.barrier()
    for part in module.modules():
        for name, param in list(part.named_parameters(recurse=False)):
            setattr(part, name, new[param])
    return flat


@mutant("share_parameters", fails=(WRITES, ONE_COPY))
def copies_out(module):
    """Rank 0's values arrive through shared memory, and every rank copies them out."""
    params = list(module.parameters())
    flat = mapped(total_of(params))
    if dist.get_rank() == 0:
        for param, place in laid_out(params, flat):
            place.copy_(param.data)
    dist.barrier()
    flat = flat.clone()
    for param, place in laid_out(params, flat):
        param.data = place
    return flat


@mutant("share_parameters", fails=NO_NAME)
def named_file(module):
    """A file that stays where it is."""
    params = list(module.parameters())
    path = [os.path.join(tempfile.mkdtemp(prefix="one-copy-"), "parameters")]
    dist.broadcast_object_list(path, src=0)
    if dist.get_rank() == 0:  # who makes the file longer writes a zero to its beginning
        with open(path[0], "wb") as file:
            file.truncate(4 * total_of(params))
    dist.barrier()
    flat = torch.from_file(path[0], shared=True, size=total_of(params))
    if dist.get_rank() == 0:
        for param, place in laid_out(params, flat):
            place.copy_(param.data)
    dist.barrier()
    for param, place in laid_out(params, flat):
        param.data = place
    return flat


@mutant("add_in_turn", fails=(MEAN, ORDER))
def all_at_once(total, grad):
    """Everybody reads, everybody writes: the last one's sum is what remains."""
    n = dist.get_world_size()
    if dist.get_rank() == 0:
        total.zero_()
    dist.barrier()
    read = total.clone()
    for turn in range(n):
        if dist.get_rank() == turn:
            total.copy_(read + grad / n)
        dist.barrier()


@mutant("add_in_turn", fails=(MEAN, ORDER))
def adds_to_what_was_there(total, grad):
    """Nobody takes away the sum of the step before."""
    n = dist.get_world_size()
    for turn in range(n):
        if dist.get_rank() == turn:
            total += grad / n
        dist.barrier()


@mutant("add_in_turn", fails=(MEAN, ORDER))
def divides_n_times(total, grad):
    """Each rank divides the sum, and it is the same sum."""
    n = dist.get_world_size()
    for turn in range(n):
        if dist.get_rank() == turn:
            total.copy_(grad) if turn == 0 else total.add_(grad)
        dist.barrier()
    for turn in range(n):
        if dist.get_rank() == turn:
            total /= n
        dist.barrier()


@mutant("add_in_turn", fails=ORDER)
def last_rank_first(total, grad):
    """A sum in another order has other bits."""
    n = dist.get_world_size()
    for turn in reversed(range(n)):
        if dist.get_rank() == turn:
            total.copy_(grad / n) if turn == n - 1 else total.add_(grad / n)
        dist.barrier()


@mutant("add_in_turn", fails=WHOLE)
def leaves_after_its_turn(total, grad):
    """A token goes from rank to rank; who has passed it on returns before the others have added."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for _ in range(rank):
        dist.barrier()
    total.copy_(grad / n) if rank == 0 else total.add_(grad / n)
    if rank == n - 1:
        return
    early = total.clone()
    for _ in range(n - 1 - rank):
        dist.barrier()
    total = early


@mutant("add_in_turn", fails=(NO_BYTES, ORDER))
def all_reduces(total, grad):
    """The bytes that the shared memory was to save, and torch's order of sums."""
    mean = grad / dist.get_world_size()
    dist.all_reduce(mean)
    total.copy_(mean)
    dist.barrier()


class Sliced:
    """The right one, from which the wrong ones differ in one thing."""

    def __init__(self, param, grad, optimizer_class, **settings):
        rank, n = dist.get_rank(), dist.get_world_size()
        own = self.slice(param.numel(), rank, n)
        self.param, self.grad = nn.Parameter(param[own]), grad[own]
        self.optimizer = optimizer_class([self.param], **settings)

    def slice(self, numel, rank, n):
        return slice(numel * rank // n, numel * (rank + 1) // n)

    def step(self):
        dist.barrier()
        self.update()
        dist.barrier()

    def update(self):
        self.param.grad = self.grad
        self.optimizer.step()


@mutant("SliceOptimizer", fails=(AS_ONE, SLICES, BEFORE, AFTER))
class OnEveryRank(Sliced):
    """Every rank updates everything, and it is the same memory: n steps instead of one."""

    def slice(self, numel, rank, n):
        return slice(0, numel)

    def step(self):
        for turn in range(dist.get_world_size()):
            dist.barrier()
            if dist.get_rank() == turn:
                self.update()
        dist.barrier()


@mutant("SliceOptimizer", fails=SLICES)
class Rank0Alone(Sliced):
    """Right values, but one rank holds all states and does all the work."""

    def slice(self, numel, rank, n):
        return slice(0, numel if rank == 0 else 0)


@mutant("SliceOptimizer", fails=(AS_ONE, SLICES, BEFORE, AFTER))
class DropsTheRest(Sliced):
    """What does not divide evenly belongs to nobody."""

    def slice(self, numel, rank, n):
        return slice(numel // n * rank, numel // n * (rank + 1))


@mutant("SliceOptimizer", fails=BEFORE)
class DoesNotWaitBefore(Sliced):
    """Changes the parameters while a late rank still computes with them."""

    def step(self):
        self.update()
        dist.barrier()


@mutant("SliceOptimizer", fails=AFTER)
class DoesNotWaitAfter(Sliced):
    """Goes on while a slow rank's slice is still old."""

    def step(self):
        dist.barrier()
        self.update()


@mutant("SliceOptimizer", fails=(AS_ONE, BEFORE, AFTER))
class WholeGradient(Sliced):
    """Each slice of the parameters is updated with the beginning of the gradients."""

    def __init__(self, param, grad, optimizer_class, **settings):
        super().__init__(param, grad, optimizer_class, **settings)
        self.grad = grad[: self.param.numel()]
