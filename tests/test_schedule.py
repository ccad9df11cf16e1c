"""The plans of `pdt.comm.schedule`, played through for up to 64 ranks without any rank."""

import pytest
import torch

from pdt.comm.schedule import ring_steps, shard_numel, shards, tree_rounds


@pytest.mark.parametrize("n", range(1, 65))
def test_shards_cover_the_tensor_in_order_and_evenly(n: int) -> None:
    for numel in (0, 1, n - 1, n, n + 1, 3 * n + n // 2):
        parts = shards(torch.arange(numel).view(1, numel), n)
        assert torch.equal(torch.cat(parts), torch.arange(numel))
        sizes = [len(part) for part in parts]
        assert sizes == [shard_numel(numel, rank, n) for rank in range(n)]
        assert max(sizes) - min(sizes) <= 1


def test_shards_are_views_that_can_be_received_into() -> None:
    tensor = torch.zeros(3, 4)
    for rank, part in enumerate(shards(tensor, 5)):
        part.fill_(rank)
    assert tensor.view(-1).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("n", range(1, 65))
def test_ring_reduce_scatter_sums_every_term_once(n: int) -> None:
    terms = [[{rank} for _ in range(n)] for rank in range(n)]  # terms[rank][shard]
    plans = [ring_steps(rank - 1, n) for rank in range(n)]
    for step in range(n - 1):
        sent = [terms[rank][plans[rank][step][0]] for rank in range(n)]
        for rank in range(n):
            left, shard = (rank - 1) % n, plans[rank][step][1]
            assert shard == plans[left][step][0]
            assert not sent[left] & terms[rank][shard]
            terms[rank][shard] = sent[left] | terms[rank][shard]
    assert all(terms[rank][rank] == set(range(n)) for rank in range(n))


@pytest.mark.parametrize("n", range(1, 65))
def test_ring_all_gather_sends_only_what_has_arrived(n: int) -> None:
    have = [{rank} for rank in range(n)]
    plans = [ring_steps(rank, n) for rank in range(n)]
    for step in range(n - 1):
        assert all(plans[rank][step][0] in have[rank] for rank in range(n))
        arrived = [plans[(rank - 1) % n][step][0] for rank in range(n)]
        for rank, shard in enumerate(arrived):
            assert shard == plans[rank][step][1]
            assert shard not in have[rank]
            have[rank].add(shard)
    assert all(shards_held == set(range(n)) for shards_held in have)


@pytest.mark.parametrize("n", range(1, 65))
def test_tree_reaches_every_rank_once_in_log2_rounds(n: int) -> None:
    have = {0}
    for pairs in tree_rounds(n):
        busy = [rank for pair in pairs for rank in pair]
        assert len(set(busy)) == len(busy)
        assert {sender for sender, _ in pairs} <= have
        receivers = {receiver for _, receiver in pairs}
        assert not receivers & have
        have |= receivers
    assert have == set(range(n))
    assert len(tree_rounds(n)) == (n - 1).bit_length()
