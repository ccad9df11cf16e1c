"""The laws of `pdt.comm.cost`, held to hand counts, to a simulated port, and to each other."""

import math

import pytest

from pdt.comm import cost
from pdt.comm.cost import Link

LINK = Link(latency_s=1e-3, bandwidth=1e6)
INSIDE = Link(latency_s=1e-6, bandwidth=1e9)
TWO_NODES = Link(1e-3, 1e6, ranks_per_node=2, inside=INSIDE)


@pytest.mark.parametrize(
    ("op", "sent", "seconds"),
    [
        ("all_reduce", 6000, 6e-3 + 6e-3),
        ("all_gather", 3000, 3e-3 + 3e-3),
        ("reduce_scatter", 3000, 3e-3 + 3e-3),
        ("all_to_all", 3000, 3e-3 + 3e-3),
        ("broadcast", 3000, 3e-3 + 4e-3),
        ("reduce", 3000, 3e-3 + 4e-3),
        ("gather", 750, 3e-3 + 3e-3),
        ("scatter", 750, 3e-3 + 3e-3),
        ("send", 4000, 1e-3 + 4e-3),
        ("recv", 0, 1e-3 + 4e-3),
        ("barrier", 0, 2e-3),
    ],
)
def test_four_ranks_match_hand_counts(op: str, sent: int, seconds: float) -> None:
    assert cost.wire_nbytes(op, 4000, 4) == sent
    assert cost.time_s(op, 4000, 4, LINK) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("op", cost.LAWS)
def test_one_rank_is_free(op: str) -> None:
    assert cost.wire_nbytes(op, 4000, 1) == 0
    assert cost.time_s(op, 4000, 1, LINK) == 0


@pytest.mark.parametrize("n", range(2, 65))
def test_bytes_are_exact_for_every_number_of_ranks(n: int) -> None:
    assert cost.wire_nbytes("all_reduce", 12 * n, n) == 24 * (n - 1)
    assert cost.wire_nbytes("all_gather", 12 * n, n) == 12 * (n - 1)
    assert cost.wire_nbytes("gather", 12 * n * n, n) * n == pytest.approx(12 * n * (n - 1))


@pytest.mark.parametrize("n", [2, 3, 4, 7, 16])
def test_chain_is_the_limit_of_many_pieces(n: int) -> None:
    """Pieces down a chain: a rank takes a piece when it and the one before it have let go."""

    def simulated(num_pieces: int) -> float:
        piece_s = 1.0 / num_pieces
        free = [0.0] * n
        for _ in range(num_pieces):
            arrived = 0.0
            for hop in range(n - 1):
                free[hop] = arrived = max(free[hop], arrived) + piece_s
        return arrived

    free_latency = Link(0.0, 1.0)
    assert simulated(1) == pytest.approx(n - 1)
    assert simulated(1000) == pytest.approx(
        cost.time_s("broadcast", 1.0, n, free_latency), rel=0.02
    )


@pytest.mark.parametrize(("n", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_tree_takes_log2_rounds(n: int, rounds: int) -> None:
    assert cost.tree_broadcast_s(500, n, LINK) == pytest.approx(rounds * 1.5e-3)
    assert cost.tree_all_reduce_s(500, n, LINK) == pytest.approx(2 * rounds * 1.5e-3)
    assert cost.time_s("barrier", 0, n, LINK) == pytest.approx(rounds * 1e-3)


@pytest.mark.parametrize("n", [*range(4, 65), 1000])
def test_ring_and_tree_cross_at_the_crossover(n: int) -> None:
    at = cost.crossover_nbytes(n, LINK)
    ring, tree = cost.ring_all_reduce_s, cost.tree_all_reduce_s
    assert ring(at, n, LINK) == pytest.approx(tree(at, n, LINK))
    assert ring(at * 1.1, n, LINK) < tree(at * 1.1, n, LINK)
    assert ring(at * 0.9, n, LINK) > tree(at * 0.9, n, LINK)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ring_never_loses_up_to_three_ranks(n: int) -> None:
    assert cost.crossover_nbytes(n, LINK) == 0
    for nbytes in (0, 1, 10**9):
        ring_s = cost.ring_all_reduce_s(nbytes, n, LINK)
        assert ring_s <= cost.tree_all_reduce_s(nbytes, n, LINK) * (1 + 1e-12)


def test_parameter_server_carries_every_tensor_twice() -> None:
    assert cost.parameter_server_s(1000, 5, LINK) == pytest.approx(8 * 2e-3)
    assert cost.parameter_server_s(1000, 1, LINK) == 0


def test_two_levels_equal_the_sum_of_their_three_steps() -> None:
    got = cost.two_level_all_reduce_s(8000, 3, 2, TWO_NODES)
    inside_s = 2 * (1e-6 + 4000 / 1e9)
    between_s = 4 * (1e-3 + 4000 / 3 / 1e6)
    assert got == pytest.approx(inside_s + between_s)
    assert got < cost.ring_all_reduce_s(8000, 6, TWO_NODES)
    assert cost.two_level_all_reduce_s(8000, 1, 4, LINK) == pytest.approx(
        cost.ring_all_reduce_s(8000, 4, LINK)
    )


def test_two_levels_refuse_a_link_of_another_node_size() -> None:
    with pytest.raises(ValueError, match="ranks_per_node is 4, but the link has 2"):
        cost.two_level_all_reduce_s(8000, 3, 4, TWO_NODES)


def test_buckets_pay_a_latency_each_and_the_last_holds_the_rest() -> None:
    one = cost.ring_all_reduce_s
    assert cost.bucketed_s(2500, 1000, 4, LINK) == pytest.approx(
        2 * one(1000, 4, LINK) + one(500, 4, LINK)
    )
    assert cost.bucketed_s(2500, math.inf, 4, LINK) == pytest.approx(one(2500, 4, LINK))
    assert cost.bucketed_s(0, 1000, 4, LINK) == 0


def test_ranks_of_one_node_talk_over_the_inside_link() -> None:
    flat = Link(1e-3, 1e6)
    assert TWO_NODES.between(0, 1) == TWO_NODES.between(3, 2) == INSIDE
    assert TWO_NODES.between(1, 2) == TWO_NODES.between(0, 5) == flat
    assert LINK.between(0, 99) == LINK


def test_three_levels_nest() -> None:
    pod = Link(1e-2, 1e5, ranks_per_node=4, inside=TWO_NODES)
    assert pod.between(0, 1) == INSIDE
    assert pod.between(0, 2) == Link(1e-3, 1e6)
    assert pod.between(3, 4) == Link(1e-2, 1e5)


def test_slowest_hop_of_a_ring_depends_on_its_ranks() -> None:
    assert TWO_NODES.slowest([0, 1]) == TWO_NODES.slowest([3]) == INSIDE
    assert TWO_NODES.slowest([0, 1, 2, 3]) == TWO_NODES.slowest([0, 2]) == Link(1e-3, 1e6)


def test_fit_recovers_an_exact_line_over_six_decades() -> None:
    nbytes = [10.0**k for k in range(2, 9)]
    fit = cost.fit_alpha_beta(nbytes, [2e-4 + s / 3e9 for s in nbytes])
    assert fit.latency_s == pytest.approx(2e-4, rel=1e-9)
    assert fit.bandwidth == pytest.approx(3e9, rel=1e-9)
    assert fit.r2_log == pytest.approx(1.0)
    assert fit.time_s(3e9) == pytest.approx(1.0002)


def test_small_and_large_sizes_count_alike() -> None:
    """20 % on the largest time moves the latency little: plain least squares would ruin it."""
    nbytes = [10.0**k for k in range(2, 9)]
    seconds = [2e-4 + s / 3e9 for s in nbytes]
    seconds[-1] *= 1.2
    assert cost.fit_alpha_beta(nbytes, seconds).latency_s == pytest.approx(2e-4, rel=0.02)


def test_fit_is_the_minimum_of_the_relative_error() -> None:
    nbytes, seconds = [1e2, 1e3, 1e4, 1e5], [1.1e-3, 0.8e-3, 9e-3, 60e-3]
    fit = cost.fit_alpha_beta(nbytes, seconds)

    def loss(latency_s: float, bandwidth: float) -> float:
        pairs = zip(nbytes, seconds, strict=True)
        return sum(((latency_s + s / bandwidth) / t - 1) ** 2 for s, t in pairs)

    best = loss(fit.latency_s, fit.bandwidth)
    for a, b in [(1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)]:
        assert loss(fit.latency_s * a, fit.bandwidth * b) > best
    assert 0.9 < fit.r2_log < 1


def test_fit_never_has_a_negative_constant() -> None:
    from_zero = cost.fit_alpha_beta([1e3, 1e4], [1e-4, 2e-3])
    assert from_zero.latency_s == 0
    assert from_zero.bandwidth > 0
    falling = cost.fit_alpha_beta([1e3, 1e4], [2e-3, 1e-3])
    assert falling.bandwidth == math.inf
    assert 1e-3 < falling.latency_s < 2e-3


@pytest.mark.parametrize("n", [2, 3, 8])
def test_fit_gives_back_the_link_that_made_the_times(n: int) -> None:
    nbytes = [10.0**k for k in range(2, 9)]
    fit = cost.fit_alpha_beta(nbytes, [cost.time_s("all_reduce", s, n, LINK) for s in nbytes])
    link = fit.link("all_reduce", n)
    assert link.latency_s == pytest.approx(LINK.latency_s)
    assert link.bandwidth == pytest.approx(LINK.bandwidth)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Link(-1.0, 1e9), "latency_s .* got -1.0"),
        (lambda: Link(math.nan, 1e9), "latency_s .* got nan"),
        (lambda: Link(0.0, 0), "bandwidth .* got 0"),
        (lambda: Link(0.0, math.nan), "bandwidth .* got nan"),
        (lambda: Link(0.0, 1.0, ranks_per_node=2), "ranks_per_node=2, inside=None"),
        (lambda: Link(0.0, 1.0, ranks_per_node=0, inside=INSIDE), "ranks_per_node .* got 0"),
        (lambda: LINK.slowest([]), "ranks is empty"),
        (lambda: cost.wire_nbytes("allreduce", 1, 2), "'allreduce' is not one of all_reduce, "),
        (lambda: cost.time_s("send", -1, 2, LINK), "nbytes .* got -1"),
        (lambda: cost.tree_broadcast_s(1, 0, LINK), "n must .* got 0"),
        (lambda: cost.two_level_all_reduce_s(1, 2, 0, LINK), "n must .* got 0"),
        (lambda: cost.bucketed_s(1, 0, 2, LINK), "bucket_nbytes .* got 0"),
        (lambda: cost.fit_alpha_beta([1, 1], [1, 2]), r"2 nbytes \(1 different\) and 2 seconds"),
        (lambda: cost.fit_alpha_beta([1, 2], [1]), r"2 nbytes \(2 different\) and 1 seconds"),
        (lambda: cost.fit_alpha_beta([1, 2], [0, 1]), r"positive, got 0\.\.1"),
        (lambda: cost.Fit(1e-3, 1e9, 1.0).link("all_reduce", 1), "n must .* got 1"),
    ],
)
def test_errors_name_the_value(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
