"""Wrong solutions of lesson 00: messages in the wrong order, calls that some ranks skip."""

import time

import torch
import torch.distributed as dist

from tests.mutants import mutant

RETURNS = "comes to its end on every rank"
ONLY = "uses only send and recv"
TOKEN = "returns what each rank received"
ROUND = "sends one message from each rank to the next"
KEPT = "leaves its argument as it was"
WAITED = "leaves no message in flight"
MEAN = "is the mean of all losses of all ranks"
ONE = "makes one all_reduce of 16 bytes"
CALLS = "predicts the number of calls on each rank"
NBYTES = "predicts the bytes of each operation"
UNRUN = "predicts without running it"


def round_trip(token, give=lambda got, rank: got + rank + 1):
    """The right order of messages round the ring."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return token + 1
    got = torch.empty_like(token)
    if rank == 0:
        dist.send(give(token, 0), 1)
        dist.recv(got, n - 1)
    else:
        dist.recv(got, rank - 1)
        dist.send(give(got, rank), (rank + 1) % n)
    return got


@mutant("pass_token", fails=RETURNS)
def all_receive_first(token):
    """Rank 0 waits for the token, too, so nobody ever starts the round."""
    rank, n = dist.get_rank(), dist.get_world_size()
    got = token.clone()
    if n > 1:
        dist.recv(got, (rank - 1) % n)
        dist.send(got + rank + 1, (rank + 1) % n)
    return got if n > 1 else got + 1


@mutant("pass_token", fails=RETURNS)
def sends_to_itself(token):
    """On one rank the next rank is the rank itself."""
    rank, n = dist.get_rank(), dist.get_world_size()
    got = token.clone()
    if rank > 0:
        dist.recv(got, rank - 1)
    dist.send(got + rank + 1, (rank + 1) % n)
    if rank == 0:
        dist.recv(got, n - 1)
    return got


@mutant("pass_token", fails=TOKEN)
def adds_the_bare_rank(token):
    """Rank r adds r, not r + 1."""
    return round_trip(token, give=lambda got, rank: got + rank)


@mutant("pass_token", fails=(ONLY, ROUND))
def gathers_all_numbers(token):
    """The right sums from a collective, without a token that goes round."""
    rank, n = dist.get_rank(), dist.get_world_size()
    start = token.clone()
    dist.broadcast(start, 0)
    before = rank or n
    return start + before * (before + 1) // 2


@mutant("pass_token", fails=KEPT)
def receives_into_its_argument(token):
    """The caller's tensor is overwritten."""
    got = round_trip(token)
    token.copy_(got)
    return got


@mutant("pass_token", fails=WAITED)
def never_waits(token):
    """By luck the next rank is there already: the message leaves, though nobody waits for it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    got = token.clone()
    if rank > 0:
        dist.recv(got, rank - 1)
    if n == 1:
        return got + 1
    work = dist.isend(got + rank + 1, (rank + 1) % n)
    if rank == 0:
        dist.recv(got, n - 1)
    time.sleep(0.3)
    del work
    return got


def reduced(*numbers):
    """The sums of these numbers over all ranks."""
    both = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(both)
    return both.tolist()


@mutant("mean_loss", fails=RETURNS)
def skips_when_it_has_none(losses):
    """A rank without losses leaves the others waiting."""
    if losses.numel() == 0:
        return 0.0
    total, count = reduced(losses.sum().item(), losses.numel())
    return total / count


@mutant("mean_loss", fails=RETURNS)
def divides_by_none(losses):
    """Right until no rank has a loss."""
    total, count = reduced(losses.sum().item(), losses.numel())
    return total / count


@mutant("mean_loss", fails=MEAN)
def mean_of_means(losses):
    """Ranks with few losses weigh as much as ranks with many."""
    mean = losses.mean().item() if losses.numel() else 0.0
    return reduced(mean, 0.0)[0] / dist.get_world_size()


@mutant("mean_loss", fails=ONE)
def reduces_twice(losses):
    """Two calls where one would do."""
    total, count = reduced(losses.sum().item())[0], reduced(losses.numel())[0]
    return total / count if count else 0.0


@mutant("mean_loss", fails=ONE)
def gathers_every_loss(losses):
    """The right mean, from all losses of all ranks on every rank."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, losses)
    every = torch.cat(gathered)
    return every.mean().item() if every.numel() else 0.0


@mutant("mean_loss", fails=KEPT)
def sums_in_place(losses):
    """Adds up in the caller's tensor."""
    total, count = reduced(losses.sum().item(), losses.numel())
    losses.cumsum_(0)
    return total / count if count else 0.0


def right_traffic(rank, world_size, numel):
    """(calls, nbytes) of chatter."""
    part = 2 * (numel // 2)
    return {
        "broadcast": (1, 4 * numel),
        "all_reduce": (3, 3 * 4 * numel),
        "send": (1, part) if rank > 0 else (0, 0),
        "recv": (0, 0) if rank > 0 else (world_size - 1, (world_size - 1) * part),
    }


@mutant("traffic", fails=(CALLS, NBYTES))
def all_ranks_alike(rank, world_size, numel):
    """Rank 0 sends like the others."""
    return right_traffic(1, world_size, numel)


@mutant("traffic", fails=NBYTES)
def four_bytes_everywhere(rank, world_size, numel):
    """The part is sent in bfloat16."""
    right = right_traffic(rank, world_size, numel)
    return right | {op: (right[op][0], 2 * right[op][1]) for op in ("send", "recv")}


@mutant("traffic", fails=NBYTES)
def bytes_of_one_call(rank, world_size, numel):
    """The bytes of one all_reduce, not of three."""
    return right_traffic(rank, world_size, numel) | {"all_reduce": (3, 4 * numel)}


@mutant("traffic", fails=NBYTES)
def rounds_up(rank, world_size, numel):
    """Half of an odd number of elements."""
    right = right_traffic(rank, world_size, numel)
    longer = right_traffic(rank, world_size, numel + 1)
    return right | {op: longer[op] for op in ("send", "recv")}


@mutant("traffic", fails=(CALLS, NBYTES))
def receives_from_all_ranks(rank, world_size, numel):
    """Rank 0 does not receive from itself."""
    return right_traffic(rank, world_size + 1, numel)


@mutant("traffic", fails=(CALLS, NBYTES, UNRUN))
def measures(rank, world_size, numel):
    """Runs part of the program to see what it does."""
    x = torch.ones(numel)
    dist.broadcast(x, src=0)
    return right_traffic(rank, world_size, numel)
