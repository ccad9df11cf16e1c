"""`pdt.comm.collectives` on live ranks: every shape, dtype, stride and world size; bytes; errors.

Each function below runs on every rank and returns the cases that went wrong: a test wants none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pdt import Ranks
from pdt.comm import collectives, meter
from pdt.comm.cost import wire_nbytes
from pdt.comm.schedule import shard_numel

SHAPES = [(), (0,), (1,), (2,), (3,), (7,), (4, 6), (5, 3, 2), (64,)]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int64, torch.uint8, torch.complex64]
STRIDES = ["contiguous", "transposed", "every other"]
BROADCASTS = ["naive_broadcast", "broadcast", "tree_broadcast"]
RINGS = ["ring_all_reduce", "ring_reduce_scatter", "ring_all_gather"]
SCALABLE = [*RINGS, "all_reduce", "reduce_scatter", "all_gather", "all_to_all"]


@pytest.fixture(scope="module", params=[1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, backend="gloo") as live:
        yield live


def made(shape: tuple[int, ...], dtype: torch.dtype, rank: int, stride: str = "contiguous"):
    """The tensor of a rank, known to all ranks; integers in bfloat16's exact range, and halves."""
    seeded = torch.Generator().manual_seed(1000 * rank + sum(shape))
    values = (torch.randint(0, 100, shape, generator=seeded) / 2).to(dtype)
    if stride == "transposed":
        return values.t().contiguous().t() if values.dim() == 2 else values
    if stride == "every other":
        room = torch.zeros(*values.shape, 2, dtype=dtype)
        room[..., 0] = values
        return room[..., 0]
    return values


CASES = [
    *((shape, torch.float32, stride) for shape in SHAPES for stride in STRIDES),
    *((shape, dtype, "contiguous") for shape in [(), (7,)] for dtype in DTYPES),
]
MANY_PIECES = [((64,), torch.float32, "contiguous"), ((5, 3, 2), torch.bfloat16, "every other")]


def in_tiny_pieces(fn: Callable[..., Any], *args: Any) -> Any:
    """Run with pieces of 8 bytes, so that small tensors travel in many."""
    usual = collectives.PIECE_NBYTES
    collectives.PIECE_NBYTES = 8
    try:
        return fn(*args)
    finally:
        collectives.PIECE_NBYTES = usual


def in_rank_order(terms: list[Tensor]) -> Tensor:
    """The sum of the ranks' tensors in their order, in fp32 and rounded once where it is low."""
    low = terms[0].dtype in (torch.float16, torch.bfloat16)
    wide = [term.float() if low else term for term in terms]
    return reduce(torch.add, wide).to(terms[0].dtype)


def in_ring_order(terms: list[Tensor]) -> Tensor:
    """Shard r summed as r+1, r+2, ..., r, rounded at each hop."""
    n = len(terms)
    flat = [torch.tensor_split(term.reshape(-1), n) for term in terms]
    shards = [reduce(torch.add, [flat[(r + k) % n][r] for k in range(1, n + 1)]) for r in range(n)]
    return torch.cat(shards).view(terms[0].shape)


SUM = {"all_reduce": in_rank_order, "ring_all_reduce": in_ring_order}


def wrong_broadcasts(cases: Sequence[Any] = CASES) -> list[Any]:
    rank, n = collectives.place()
    wrong = []
    for name in BROADCASTS:
        for shape, dtype, stride in cases:
            root = sum(shape) % n
            tensor = made(shape, dtype, rank, stride)
            getattr(collectives, name)(tensor, root)
            if not torch.equal(tensor, made(shape, dtype, root)):
                wrong.append((name, shape, dtype, stride))
    return wrong


def test_broadcasts_give_every_rank_the_roots_tensor(ranks: Ranks) -> None:
    assert not any(ranks.run(wrong_broadcasts))
    assert not any(ranks.run(in_tiny_pieces, wrong_broadcasts, MANY_PIECES))


def wrong_sums(cases: Sequence[Any] = CASES) -> list[Any]:
    rank, n = collectives.place()
    wrong = []
    for shape, dtype, stride in cases:
        terms = [made(shape, dtype, r) for r in range(n)]
        for name, summed in SUM.items():
            tensor = made(shape, dtype, rank, stride)
            getattr(collectives, name)(tensor)
            if not torch.equal(tensor, summed(terms)):
                wrong.append((name, shape, dtype, stride))
            name = name.replace("all_reduce", "reduce_scatter")
            whole, own = made(shape, dtype, rank, stride), summed(terms).view(-1).tensor_split(n)
            part = made((len(own[rank]),), dtype, 0, stride)
            getattr(collectives, name)(part, whole)
            if not (torch.equal(part, own[rank]) and torch.equal(whole, terms[rank])):
                wrong.append((name, shape, dtype, stride))
    return wrong


def test_sums_are_bitwise_those_of_the_stated_order(ranks: Ranks) -> None:
    assert not any(ranks.run(wrong_sums))
    assert not any(ranks.run(in_tiny_pieces, wrong_sums, MANY_PIECES))


def wrong_gathers(cases: Sequence[Any] = CASES) -> list[Any]:
    rank, n = collectives.place()
    wrong = []
    for shape, dtype, stride in cases:
        expected = made(shape, dtype, 9)
        for name in ("all_gather", "ring_all_gather"):
            whole = made(shape, dtype, rank, stride)
            part = expected.view(-1).tensor_split(n)[rank].clone()
            getattr(collectives, name)(whole, part)
            if not torch.equal(whole, expected):
                wrong.append((name, shape, dtype, stride))
    return wrong


def test_gathers_put_every_shard_in_its_place(ranks: Ranks) -> None:
    assert not any(ranks.run(wrong_gathers))


def wrong_exchanges() -> list[Any]:
    rank, n = collectives.place()
    wrong = []

    def shape(source: int, target: int) -> tuple[int, ...]:
        return () if source == target == 1 else ((3 * source + target) % 4, 2)  # some are empty

    for dtype in DTYPES:
        for stride in STRIDES:
            inputs = [made(shape(rank, j), dtype, 10 * rank + j, stride) for j in range(n)]
            outputs = [made(shape(j, rank), dtype, 99, stride) for j in range(n)]
            collectives.all_to_all(outputs, inputs)
            expected = [made(shape(j, rank), dtype, 10 * j + rank) for j in range(n)]
            if not all(map(torch.equal, outputs, expected)):
                wrong.append((dtype, stride))
    return wrong


def test_all_to_all_moves_unequal_sizes_between_all_pairs(ranks: Ranks) -> None:
    assert not any(ranks.run(wrong_exchanges))


def differences_from_torch() -> dict[str, float]:
    rank, n = collectives.place()
    mine = torch.randn(12 * n, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    theirs, ours = mine.clone(), {name: mine.clone() for name in SUM}
    dist.all_reduce(theirs)
    for name, tensor in ours.items():
        getattr(collectives, name)(tensor)
    gathered, by_us = [torch.empty_like(mine) for _ in range(n)], mine.new_empty(12 * n * n)
    dist.all_gather(gathered, mine)
    collectives.all_gather(by_us, mine)
    exchanged, by_pairs = torch.empty_like(mine), torch.empty_like(mine)
    dist.all_to_all_single(exchanged, mine)
    collectives.all_to_all(by_pairs.tensor_split(n), mine.tensor_split(n))
    errors = {name: (tensor - theirs).abs().max() for name, tensor in ours.items()}
    errors["all_gather"] = (by_us - torch.cat(gathered)).abs().max()
    errors["all_to_all"] = (by_pairs - exchanged).abs().max()
    return {name: float(error) for name, error in errors.items()}


def test_results_are_those_of_torch(ranks: Ranks) -> None:
    for errors in ranks.run(differences_from_torch):
        assert errors["all_gather"] == errors["all_to_all"] == 0
        assert max(errors.values()) < 1e-14  # float64: only the order of at most 4 terms differs


def ring_digest() -> bytes:
    rank, _ = collectives.place()
    tensor = torch.randn(1001, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    collectives.ring_all_reduce(tensor)
    return tensor.numpy().tobytes()


def test_ring_all_reduce_is_bitwise_the_same_on_all_ranks(ranks: Ranks) -> None:
    assert len(set(ranks.run(ring_digest))) == 1


def sums_of_small_terms(dtype: torch.dtype) -> float:
    """256 + 1 + 1 + 1: in bfloat16 each 1 is lost unless the sum is wider than its terms."""
    rank, _ = collectives.place()
    tensor = torch.full((5,), 256.0 if rank == 0 else 1.0, dtype=dtype)
    collectives.all_reduce(tensor)
    return float(tensor[0])


def test_direct_sum_of_bfloat16_rounds_once(ranks: Ranks) -> None:
    n = ranks.world_size
    rounded = float(torch.tensor(255.0 + n).to(torch.bfloat16))
    assert ranks.run(sums_of_small_terms, torch.bfloat16) == [rounded] * n
    assert rounded > 256 or n < 3  # 257 lies halfway and is rounded to even


def counted(name: str, numel: int, check: bool) -> tuple[int, int]:
    """Bytes this rank sends, and calls of all-gather (which only the check makes)."""
    rank, n = collectives.place()
    whole, part = torch.zeros(numel), torch.zeros(shard_numel(numel, rank, n))
    operands = {
        "reduce_scatter": (part, whole),
        "all_gather": (whole, part),
        "all_to_all": (whole.clone().tensor_split(n), whole.tensor_split(n)),
    }
    with meter() as m:
        operation = name.removeprefix("ring_")
        getattr(collectives, name)(*operands.get(operation, (whole,)), check=check)
    return m.total("send").nbytes, m.total("all_gather").calls


@pytest.mark.parametrize("name", SCALABLE)
def test_every_rank_sends_exactly_the_least_bytes(ranks: Ranks, name: str) -> None:
    numel, operation = 12 * ranks.world_size, name.removeprefix("ring_")
    expected = wire_nbytes(operation, 4 * numel, ranks.world_size)
    for check in (True, False):
        counts = ranks.run(counted, name, numel, check)
        assert counts == [(expected, int(check))] * ranks.world_size


@pytest.mark.parametrize("name", ["ring_all_reduce", "all_reduce"])
def test_uneven_shards_send_the_same_bytes_on_average(ranks: Ranks, name: str) -> None:
    n, numel = ranks.world_size, 4 * ranks.world_size + 1
    sent = [nbytes for nbytes, _ in ranks.run(counted, name, numel, False)]
    assert sum(sent) / n == pytest.approx(wire_nbytes("all_reduce", 4 * numel, n))


def sent_by(name: str) -> tuple[int, int]:
    with meter() as m:
        getattr(collectives, name)(torch.zeros(100), check=False)
    return m.total("send").nbytes, m.total("recv").nbytes


def test_root_sends_n_minus_1_copies_naively_and_one_by_the_chain(ranks: Ranks) -> None:
    n = ranks.world_size
    naive, chain, tree = (ranks.run(sent_by, name) for name in BROADCASTS)
    assert naive[0][0] == 400 * (n - 1)
    assert [sent for sent, _ in chain] == [400] * (n - 1) + [0]
    assert tree[0][0] == 400 * math.ceil(math.log2(n))
    for counts in (naive, chain, tree):
        assert [received for _, received in counts] == [0] + [400] * (n - 1)


class Watched:
    """A work that remembers whether it was waited for."""

    def __init__(self, work: dist.Work) -> None:
        self.work, self.is_waited = work, False

    def wait(self) -> None:
        self.work.wait()
        self.is_waited = True


def forgotten_works() -> dict[str, int]:
    """For each collective the sends and receives that it started and did not wait for."""
    _, n = collectives.place()
    whole, part = torch.zeros(7 * n), torch.zeros(7)
    operands = {"gather": (whole, part), "scatter": (part, whole), "to_all": ([part] * n,) * 2}
    watched: list[Watched] = []
    post = collectives.post
    collectives.post = lambda *args: [
        watched.append(Watched(w)) or watched[-1] for w in post(*args)
    ]
    forgotten = {}
    try:
        for name in [*BROADCASTS, *SCALABLE]:
            watched.clear()
            given = next((given for end, given in operands.items() if name.endswith(end)), (whole,))
            getattr(collectives, name)(*given)
            assert watched or n == 1, name
            forgotten[name] = sum(not work.is_waited for work in watched)
    finally:
        collectives.post = post
    return forgotten


def test_every_send_and_receive_is_waited_for(ranks: Ranks) -> None:
    """So the tensors may be overwritten as soon as a call returns."""
    for forgotten in ranks.run(in_tiny_pieces, forgotten_works):
        assert set(forgotten.values()) == {0}, forgotten


def order_of_posts() -> list[tuple[bool, int]]:
    """(is a send, peer) in the order in which an all-gather posts them."""
    _, n = collectives.place()
    posted: list[tuple[bool, int]] = []
    start = dist.batch_isend_irecv

    def watched(ops: list[dist.P2POp]) -> list[dist.Work]:
        posted.extend((op.op is dist.isend, op.group_peer) for op in ops)
        return start(ops)

    dist.batch_isend_irecv = watched
    try:
        collectives.all_gather(torch.zeros(n), torch.zeros(1))
    finally:
        dist.batch_isend_irecv = start
    return posted


def test_of_two_ranks_the_lower_one_sends_first(ranks: Ranks) -> None:
    """Else both would receive first, for ever, where a pair's messages go one by one."""
    for rank, posted in enumerate(ranks.run(order_of_posts)):
        for peer in set(range(ranks.world_size)) - {rank}:
            assert [is_send for is_send, to in posted if to == peer] == [rank < peer, peer < rank]


def leaf_after_sum() -> tuple[float, bool]:
    leaf = torch.ones(3, requires_grad=True)
    collectives.all_reduce(leaf)
    return float(leaf[0]), leaf.is_leaf


def test_a_parameter_is_summed_without_entering_its_graph(ranks: Ranks) -> None:
    assert ranks.run(leaf_after_sum) == [(ranks.world_size, True)] * ranks.world_size


def refusals() -> list[str]:
    """What each mistake raises; a collective after each must work again on all ranks."""
    rank, n = collectives.place()
    last = n - 1
    vector = torch.zeros(2 * n)
    mistakes: list[Callable[[], Any]] = [
        lambda: collectives.ring_all_reduce(torch.zeros(3 if rank == last else 4)),
        lambda: collectives.all_reduce(torch.zeros(2, 3) if rank == last else torch.zeros(3, 2)),
        lambda: collectives.tree_broadcast(vector.double() if rank == last else vector),
        lambda: collectives.broadcast(vector, root=rank),
        lambda: collectives.all_gather(vector, torch.zeros(3 if rank == last else 2)),
        lambda: collectives.ring_reduce_scatter(torch.zeros(2).double(), vector),
        lambda: collectives.all_to_all([torch.zeros(5)] * n, [torch.zeros(4)] * n),
        lambda: collectives.all_to_all([vector] * n, [vector] * (n - (rank == last))),
        lambda: collectives.naive_broadcast(vector, root=n),
    ]
    said = []
    for mistake in mistakes:
        try:
            mistake()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
        tensor = torch.ones(3)
        collectives.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((3,), float(n)))
    return said


def test_every_rank_names_what_the_ranks_disagree_on(ranks: Ranks) -> None:
    n = ranks.world_size
    said = ranks.run(refusals)
    assert all(texts == said[0] for texts in said)
    said_by_one = {0: "nothing", 1: "nothing", 2: "nothing", 3: "nothing"}
    expected = {
        0: f"rank {n - 1}: float32 (3,)",
        1: f"rank {n - 1}: float32 (2, 3)",
        2: f"rank {n - 1}: float64 ({2 * n},)",
        3: f"float32 ({2 * n},), root {n - 1}",
        4: f"rank {n - 1}: float32 {2 * n} and float32 3",
        5: f"rank {n - 1}: float32 {2 * n} and float64 2",
        6: "rank 0 sends float32 4 to rank 0, which awaits float32 5",
        7: f"but rank {n - 1} passes {n - 1} and {n}",
        8: f"0 to {n - 1}, got {n}",
    }
    for i, text in enumerate(said[0]):
        if n == 1 and i in said_by_one:
            assert text == "nothing"
        else:
            assert expected[i] in text


def within_subgroups() -> list[float]:
    """Ranks 3 and 1, in this order, are ranks 1 and 0 of a group (torch sorts), 0 and 2 another."""
    rank = dist.get_rank()
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    mine, other = (odd, even) if rank % 2 else (even, odd)
    tensor = torch.full((5,), float(10**rank))
    collectives.ring_all_reduce(tensor, mine)
    chained = torch.full((2,), float(rank))
    collectives.broadcast(chained, 1, mine)
    gathered = torch.zeros(2)
    collectives.all_gather(gathered, torch.full((1,), float(rank)), mine)
    with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
        collectives.all_reduce(tensor, other)
    return [float(tensor[4]), float(chained[0]), *gathered.tolist()]


def test_ranks_of_a_subgroup_are_group_ranks() -> None:
    with Ranks(4, backend="gloo") as four:
        even, odd = [101.0, 2.0, 0.0, 2.0], [1010.0, 3.0, 1.0, 3.0]
        assert four.run(within_subgroups) == [even, odd, even, odd]
