"""Collectives built from `send` and `recv`: chain, tree, ring, and direct sends.

Words: n ranks; a *shard* is one of the n parts of a flat tensor, a *piece* is a part of a shard or
of a tensor that travels while another is worked on. Ranks, peers and roots are ranks *of the
group*. All functions work in place, on tensors of any shape and stride; what is not contiguous goes
through a copy. Sums of fp16 and bf16: see each function.

With `check=True` the ranks first tell each other what they were called with (one all-gather of a
few hundred bytes: as long as one more small collective), and a mismatch raises the same ValueError
on every rank. Without it, gloo ends the *process* of a rank that gets a longer message than it
awaits, and leaves a part of the tensor untouched, silently, when the message is shorter. So the
check is on; turn it off for small tensors in a loop whose shapes you trust.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor

from pdt.comm.checks import check_pairs, check_parts, check_same
from pdt.comm.messages import Group, flat, place, post, wait
from pdt.comm.schedule import ring_steps, shards, tree_rounds

PIECE_NBYTES = 1 << 21  # large enough to hide latency, small enough to be summed in the cache
PIECES_IN_FLIGHT = 3


def naive_broadcast(
    tensor: Tensor, root: int = 0, group: Group = None, *, check: bool = True
) -> None:
    """Every rank holds the root's tensor; the root's port carries n-1 copies, the others' one."""
    rank, n = place(group)
    if check:
        check_same(tensor, group, root)
    with flat(tensor) as whole:
        if rank == root:
            wait(post([(whole, peer) for peer in range(n) if peer != root], [], group))
        else:
            wait(post([], [(whole, root)], group))


def broadcast(tensor: Tensor, root: int = 0, group: Group = None, *, check: bool = True) -> None:
    """Every rank holds the root's tensor; pieces go down a chain, so each port carries one copy.

    (n-1) latencies + S / bandwidth: a rank passes on a piece while the next one arrives.
    """
    rank, n = place(group)
    if check:
        check_same(tensor, group, root)
    is_root, is_last = rank == root, (rank + 1) % n == root
    with flat(tensor) as whole:
        pieces = whole.split(PIECE_NBYTES // whole.element_size())
        arrivals = [] if is_root else [post([], [(p, (rank - 1) % n)], group) for p in pieces]
        sends = []
        for i, piece in enumerate(pieces):
            if not is_root:
                wait(arrivals[i])
            if not is_last:
                sends += post([(piece, (rank + 1) % n)], [], group)
        wait(sends)


def tree_broadcast(
    tensor: Tensor, root: int = 0, group: Group = None, *, check: bool = True
) -> None:
    """Every rank holds the root's tensor after ceil(log2 n) rounds of whole tensors."""
    rank, n = place(group)
    if check:
        check_same(tensor, group, root)
    position = (rank - root) % n  # the tree is drawn for root 0 and turned
    with flat(tensor) as whole:
        for pairs in tree_rounds(n):
            for sender, receiver in pairs:
                if position == sender:
                    wait(post([(whole, (receiver + root) % n)], [], group))
                elif position == receiver:
                    wait(post([], [(whole, (sender + root) % n)], group))


def ring_reduce_scatter(
    output: Tensor, input: Tensor, group: Group = None, *, check: bool = True
) -> None:
    """Rank r's output holds the sum of all ranks' shard r; each sends (n-1)/n of the input.

    A partial sum travels the ring and each rank adds its own part: shard r is summed in the order
    r+1, r+2, ..., r, and rounded to its dtype at every hop.
    """
    rank, n = place(group)
    if check:
        check_parts(input, output, group)
    own = shards(input, n)
    total = own[(rank - 1) % n]
    for _, receive in ring_steps(rank - 1, n):
        arrived = torch.empty_like(own[receive])
        wait(post([(total, (rank + 1) % n)], [(arrived, (rank - 1) % n)], group))
        total = arrived.add_(own[receive])
    output.detach().copy_(total.view_as(output))


def ring_all_gather(
    output: Tensor, input: Tensor, group: Group = None, *, check: bool = True
) -> None:
    """Every rank's output holds all ranks' inputs in order; each sends (n-1)/n of the output."""
    rank, n = place(group)
    if check:
        check_parts(output, input, group)
    with flat(output) as whole:
        all_shards = shards(whole, n)
        all_shards[rank].copy_(input.detach().reshape(-1))
        for send, receive in ring_steps(rank, n):
            sends = [(all_shards[send], (rank + 1) % n)]
            wait(post(sends, [(all_shards[receive], (rank - 1) % n)], group))


def ring_all_reduce(tensor: Tensor, group: Group = None, *, check: bool = True) -> None:
    """Every rank's tensor holds the sum of all, bitwise the same; each sends 2(n-1)/n of it."""
    rank, n = place(group)
    if check:
        check_same(tensor, group)
    with flat(tensor) as whole:
        own = shards(whole, n)[rank]
        ring_reduce_scatter(own, whole, group, check=False)
        ring_all_gather(whole, own, group, check=False)


def all_to_all(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    group: Group = None,
    *,
    check: bool = True,
) -> None:
    """Rank i's outputs[j] holds rank j's inputs[i]; sizes may all differ, from pair to pair."""
    rank, n = place(group)
    if check:
        check_pairs(inputs, outputs, group)
    peers = [(rank + k) % n for k in range(1, n)]
    with ExitStack() as stack:
        boxes = [stack.enter_context(flat(output)) for output in outputs]
        sends = [(inputs[peer].detach().contiguous(), peer) for peer in peers]
        works = post(sends, [(boxes[peer], peer) for peer in peers], group)
        boxes[rank].copy_(inputs[rank].detach().reshape(-1))
        wait(works)


def all_gather(output: Tensor, input: Tensor, group: Group = None, *, check: bool = True) -> None:
    """Every rank's output holds all ranks' inputs in order; each sends (n-1)/n of the output.

    Everybody sends to everybody at once, and what arrives lands in its place: no step waits for
    another, and nothing is copied but the rank's own shard.
    """
    rank, n = place(group)
    if check:
        check_parts(output, input, group)
    peers = [(rank + k) % n for k in range(1, n)]
    with flat(output) as whole:
        all_shards = shards(whole, n)
        own = input.detach().contiguous().view(-1)
        sends = [(own, peer) for peer in peers]
        works = post(sends, [(all_shards[peer], peer) for peer in peers], group)
        if all_shards[rank].data_ptr() != own.data_ptr():
            all_shards[rank].copy_(own)
        wait(works)


def reduce_scatter(
    output: Tensor, input: Tensor, group: Group = None, *, check: bool = True
) -> None:
    """Rank r's output holds the sum of all ranks' shard r; each sends (n-1)/n of the input.

    Everybody sends everybody their shard in pieces, and a piece is summed while the next arrive.
    The order of the sum is that of the ranks, for every element, and fp16 and bf16 are summed in
    fp32 and rounded once: the result does not depend on how elements fall into shards.
    """
    _, n = place(group)
    if check:
        check_parts(input, output, group)
    all_shards = shards(input, n)
    num_pieces = max(1, -(-all_shards[0].nbytes // PIECE_NBYTES))
    pieces = [shard.tensor_split(num_pieces) for shard in all_shards]  # [rank][piece]
    with flat(output) as result:
        sums = result.tensor_split(num_pieces)
        for piece_sum, terms in zip(sums, arriving_terms(pieces, group), strict=True):
            sum_in_order(terms, piece_sum)


def arriving_terms(pieces: Sequence[Sequence[Tensor]], group: Group) -> Iterator[list[Tensor]]:
    """For each piece of this rank's shard: the terms of all ranks, by rank, to be used at once.

    `pieces[peer]` are the pieces of this rank's tensor that go to `peer`. A few of them are on
    their way while the caller works, so the buffers are few however large the tensor is.
    """
    rank, n = place(group)
    num_pieces, numel = len(pieces[rank]), pieces[0][0].numel()
    inbox = pieces[rank][0].new_empty(PIECES_IN_FLIGHT, n, numel)
    peers = [(rank + k) % n for k in range(1, n)]

    def start(i: int) -> tuple[list[Tensor], list[dist.Work]]:
        mine = pieces[rank][i]
        terms = [box[: mine.numel()] for box in inbox[i % PIECES_IN_FLIGHT]]
        terms[rank] = mine
        sends = [(pieces[peer][i], peer) for peer in peers]
        return terms, post(sends, [(terms[peer], peer) for peer in peers], group)

    started = [start(i) for i in range(min(PIECES_IN_FLIGHT, num_pieces))]
    for i in range(num_pieces):
        terms, works = started[i]
        wait(works)
        yield terms
        if i + PIECES_IN_FLIGHT < num_pieces:
            started.append(start(i + PIECES_IN_FLIGHT))


def sum_in_order(terms: Sequence[Tensor], out: Tensor) -> None:
    """out = terms[0] + terms[1] + ...; fp16 and bf16 are summed in fp32 and rounded once.

    The terms stay as they are, and `out` may be one of them: it is written last, in one pass.
    """
    is_low = out.dtype in (torch.float16, torch.bfloat16)
    total = terms[0].float() if is_low else terms[0]
    if len(terms) == 1:
        out.copy_(total)
        return
    for term in terms[1:-1]:
        total = total + term
    torch.add(total, terms[-1], out=out)


def all_reduce(tensor: Tensor, group: Group = None, *, check: bool = True) -> None:
    """Every rank's tensor holds the sum of all, bitwise the same; each sends 2(n-1)/n of it.

    The sum runs in the order of the ranks for every element, so it is the same however tensors
    are put together into buckets; fp16 and bf16 are summed in fp32 and rounded once.
    """
    rank, n = place(group)
    if check:
        check_same(tensor, group)
    with flat(tensor) as whole:
        own = shards(whole, n)[rank]
        reduce_scatter(own, whole, group, check=False)
        all_gather(whole, own, group, check=False)
