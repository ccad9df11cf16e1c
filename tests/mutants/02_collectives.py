"""Wrong solutions of lesson 02: each is a mistake of its own in a collective that almost works."""

import torch
import torch.distributed as dist

from tests.mutants import mutant

ONLY = "uses only send and recv"
SUM = "every rank ends with the sum of all tensors"
ALIKE = "every rank ends with the same bits"
BYTES = "sends 2(n-1)/n of the tensor"
WAITED = "leaves no message in flight"
RETURNS = "comes to its end on every rank"
ROOTS = "every rank ends with the root's tensor"
ONCE = "sends the tensor to each rank once"
ROUNDS = "takes ceil(log2 n) rounds"
SHARD = "rank r's output holds the sum of all shards r"
ROUNDED = "rounds float16 and bfloat16 once"
ORDER = "adds in the order of the ranks"
SHARDS = "sends each other rank its shard, and no more"
KEPT = "leaves its input as it was"


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


def tree(tensor, root, *, turned=True, cut=True, wait=True):
    """The right rounds, unless turned off; the works of this rank's sends."""
    rank, n, have, works = dist.get_rank(), dist.get_world_size(), 1, []
    shift = root if turned else 0
    position = (rank - shift) % n
    while have < n:
        if position < have and (position + have < n or not cut):
            works.append(dist.isend(tensor, (position + have + shift) % n))
            if wait:
                works[-1].wait()
        elif have <= position < 2 * have:
            dist.recv(tensor, (position - have + shift) % n)
        have *= 2
    return works


@mutant("broadcast_by_tree", fails=ROUNDS)
def root_sends_to_all(tensor, root):
    """Nobody helps the root: n-1 rounds."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.recv(tensor, root)
        return
    for k in range(1, n):
        dist.send(tensor, (root + k) % n)


@mutant("broadcast_by_tree", fails=(ROOTS, ONCE, ROUNDS))
def forgets_the_root(tensor, root):
    """The tree of root 0, whoever the root is."""
    tree(tensor, root, turned=False)


@mutant("broadcast_by_tree", fails=RETURNS)
def only_powers_of_two(tensor, root):
    """Sends to a leaf that a tree of 3 or 6 ranks does not have."""
    tree(tensor, root, cut=False)


@mutant("broadcast_by_tree", fails=ONCE)
def sends_everything_twice(tensor, root):
    """A second round of the whole tree, to be on the safe side."""
    tree(tensor, root)
    tree(tensor, root)


@mutant("broadcast_by_tree", fails=(ONLY, ONCE, ROUNDS))
def lets_torch_broadcast(tensor, root):
    """The right tensor everywhere, and not a message written."""
    dist.broadcast(tensor, root)


@mutant("broadcast_by_tree", fails=WAITED)
def leaves_sends_unfinished(tensor, root):
    """Returns while its messages may still be read from its memory (and keeps them going)."""
    tensor.works = tree(tensor, root, wait=False)


def terms_of(input, *, wire=None, wait=True):
    """This rank's shard of every rank's input, by rank; sent as dtype `wire`."""
    rank, n = dist.get_rank(), dist.get_world_size()
    shards = list(input.view(-1).to(wire or input.dtype).tensor_split(n))
    terms = [torch.empty_like(shards[rank]) for _ in range(n)]
    terms[rank] = input.view(-1).tensor_split(n)[rank]
    peers = [peer for peer in range(n) if peer != rank]
    receives = [dist.irecv(terms[peer], peer) for peer in peers]
    sends = [dist.isend(shards[peer], peer) for peer in peers]
    for work in receives + sends * wait:
        work.wait()
    input.works = sends
    return terms


def add_up(terms):
    """In the order given, in float32 where the dtype is low."""
    low = terms[0].dtype in (torch.bfloat16, torch.float16)
    total = terms[0].float() if low else terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


@mutant("reduce_scatter_once", fails=ROUNDED)
def rounds_after_every_term(output, input):
    """Adds in bfloat16, where 256 + 1 is 256."""
    output.zero_()
    for term in terms_of(input):
        output += term


@mutant("reduce_scatter_once", fails=(ORDER, WAITED))
def adds_its_own_first(output, input):
    """The order differs from rank to rank; and the sends are left to themselves."""
    terms, rank = terms_of(input, wait=False), dist.get_rank()
    output.copy_(add_up(terms[rank:] + terms[:rank]))


@mutant("reduce_scatter_once", fails=SHARDS)
def widens_before_it_sends(output, input):
    """Right sums for twice the bytes: float32 goes over the wire."""
    low = input.dtype in (torch.bfloat16, torch.float16)
    output.copy_(add_up(terms_of(input, wire=torch.float32 if low else None)))


@mutant("reduce_scatter_once", fails=KEPT)
def adds_into_its_input(output, input):
    """Rank 0's first term is a view of its input, and the sum is made there."""
    first, *others = terms_of(input)
    low = first.dtype in (torch.bfloat16, torch.float16)
    total = first.float() if low else first
    for term in others:
        total += term
    output.copy_(total)


@mutant("reduce_scatter_once", fails=(SHARD, ROUNDED, ORDER))
def forgets_its_own_term(output, input):
    """The sum of what arrived."""
    terms, rank = terms_of(input), dist.get_rank()
    terms[rank] = torch.zeros_like(terms[rank])
    output.copy_(add_up(terms))


@mutant("reduce_scatter_once", fails=(ONLY, SHARDS, ORDER))
def reduces_it_all(output, input):
    """torch's all-reduce in float64, of which it keeps one shard."""
    total = input.double()
    dist.all_reduce(total)
    output.copy_(total.view(-1).tensor_split(dist.get_world_size())[dist.get_rank()])
