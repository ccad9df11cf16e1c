"""Wrong solutions of lesson 02: each is a mistake of its own in an all-reduce that almost works."""

import torch
import torch.distributed as dist

from tests.mutants import mutant

ONLY = "uses only send and recv"
SUM = "every rank ends with the sum of all tensors"
ALIKE = "every rank ends with the same bits"
BYTES = "sends 2(n-1)/n of the tensor"
WAITED = "leaves no message in flight"
RETURNS = "comes to its end on every rank"


def exchange(send, receive, group):
    """Send to the right neighbour while receiving from the left one; the send's work."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    work = dist.isend(send, group=group, group_dst=(rank + 1) % n)
    dist.recv(receive, group=group, group_src=(rank - 1) % n)
    return work


def ring(shards, group, *, wait=True, phases=2):
    """The right algorithm, on shards that it updates; the works of its sends."""
    rank, n, works = dist.get_rank(group), dist.get_world_size(group), []
    for step in range(phases * (n - 1)):
        send, receive = shards[(rank - step) % n], shards[(rank - step - 1) % n]
        arrived = torch.empty_like(receive)
        works.append(exchange(send, arrived, group))
        if step < n - 1:
            receive += arrived
        else:
            receive.copy_(arrived)
        if wait:
            works[-1].wait()
    return works


def split(tensor, group):
    """The tensor as one shard for each rank of the group."""
    return list(tensor.view(-1).tensor_split(dist.get_world_size(group)))


@mutant("ring_all_reduce", fails=BYTES)
def through_rank_0(tensor, group=None):
    """All send everything to rank 0, which adds it up and sends it back: one port is busy."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if rank > 0:
        dist.send(tensor, group=group, group_dst=0)
        dist.recv(tensor, group=group, group_src=0)
        return
    for peer in range(1, n):
        arrived = torch.empty_like(tensor)
        dist.recv(arrived, group=group, group_src=peer)
        tensor += arrived
    for peer in range(1, n):
        dist.send(tensor, group=group, group_dst=peer)


@mutant("ring_all_reduce", fails=BYTES)
def gathers_and_sums(tensor, group=None):
    """Every tensor goes round the whole ring and each rank sums for itself: n/2 times the bytes."""
    held = tensor.clone()
    for _ in range(dist.get_world_size(group) - 1):
        arrived = torch.empty_like(held)
        exchange(held, arrived, group).wait()
        tensor += arrived
        held = arrived


@mutant("ring_all_reduce", fails=RETURNS)
def only_even_shards(tensor, group=None):
    """Works when n divides numel, and raises else."""
    ring(list(tensor.view(dist.get_world_size(group), -1)), group)


@mutant("ring_all_reduce", fails=(SUM, ALIKE, BYTES))
def forgets_the_second_phase(tensor, group=None):
    """A reduce-scatter: each rank has the sum of one shard only."""
    ring(split(tensor, group), group, phases=1)


@mutant("ring_all_reduce", fails=ONLY)
def calls_torchs_own(tensor, group=None):
    """The right sum by the right bytes, and not a line of it written."""
    dist.all_reduce(tensor, group=group)


@mutant("ring_all_reduce", fails=WAITED)
def does_not_wait(tensor, group=None):
    """Returns while its messages may still be read from its memory (and keeps them going)."""
    tensor.works = ring(split(tensor, group), group, wait=False)
