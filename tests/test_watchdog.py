"""The watchdog tells a deadlock from work, and says who waits for whom."""

from __future__ import annotations

from pdt.comm.record import Record
from pdt.ranks import watchdog
from pdt.ranks.watchdog import RankState

WORLD = (0, 1, 2)


def record(op: str, seq: int, peer: int | None = None, *, waiting: bool = True) -> Record:
    return Record(op, 12, 12.0, "0", WORLD, seq, (3,), "float32", peer, 0.0, waiting=waiting)


def state(*records: Record, returned: bool = False) -> RankState:
    pending = [r for r in records if r.waiting]
    calls: dict = {}
    for r in records:
        calls[r.stream] = max(calls.get(r.stream, 0), r.seq)
    return RankState(list(records), pending, [], calls, returned=returned)


def test_ranks_in_one_collective_are_not_deadlocked():
    states = {rank: state(record("all_reduce", 1)) for rank in WORLD}
    assert not watchdog.deadlocked(states)
    assert watchdog.verdict(states) == []


def test_a_missing_call_is_a_deadlock_once_the_rank_has_returned():
    waiting = state(record("all_reduce", 3))
    behind = state(record("all_reduce", 2, waiting=False))
    assert not watchdog.deadlocked({0: waiting, 1: behind, 2: waiting})
    behind.returned = True
    states = {0: waiting, 1: behind, 2: waiting}
    assert watchdog.deadlocked(states)
    assert watchdog.verdict(states) == [
        "ranks 0, 2 wait in all_reduce #3: rank 1 has returned without making that call"
    ]


def test_two_different_collectives_at_one_place_are_a_deadlock():
    states = {0: state(record("all_reduce", 1)), 1: state(record("broadcast", 1)), 2: state()}
    states[2].returned = True
    assert watchdog.deadlocked(states)
    assert watchdog.verdict(states)[1] == (
        "rank 1 waits in broadcast #1: rank 0 waits in all_reduce #1; "
        "rank 2 has returned without making that call"
    )


def test_ranks_that_do_the_same_are_named_together():
    states = {rank: state(record("all_reduce", 3)) for rank in (0, 2)} | {
        1: state(record("barrier", 3))
    }
    assert watchdog.verdict(states) == [
        "ranks 0, 2 wait in all_reduce #3: rank 1 waits in barrier #3",
        "rank 1 waits in barrier #3: ranks 0, 2 wait in all_reduce #3",
    ]


def test_a_ring_of_sends_is_a_deadlock():
    states = {rank: state(record("send", 1, (rank + 1) % 3)) for rank in WORLD}
    assert watchdog.deadlocked(states)
    assert len(watchdog.verdict(states)) == 3


def test_a_send_whose_receive_is_posted_is_no_deadlock():
    states = {
        0: state(record("send", 1, 1)),
        1: state(record("recv", 1, 0)),
        2: state(returned=True),
    }
    assert not watchdog.deadlocked(states)


def test_a_message_whose_sender_did_not_wait_for_it_is_named():
    dropped = state(record("send", 1, 1, waiting=False), returned=True)
    dropped.pending = dropped.recent
    states = {0: dropped, 1: state(record("recv", 1, 0)), 2: state(returned=True)}
    assert not watchdog.deadlocked(states)  # it may still be under way
    assert watchdog.verdict(states) == [
        "rank 1 waits in recv #1 from 0: rank 0 has returned without waiting for its send #1 to 1"
    ]


def test_tensors_that_do_not_match_are_named():
    states = {rank: state(record("all_reduce", 1)) for rank in WORLD}
    states[1].recent[0].shape = (4,)
    assert watchdog.verdict(states) == [
        "all_reduce #1: ranks 0, 2 passed (3,) float32; rank 1 passed (4,) float32"
    ]


def test_a_receive_from_any_source_counts_for_the_sender():
    states = {
        0: state(record("send", 1, 1)),
        1: state(record("recv", 1, None)),
        2: state(returned=True),
    }
    assert watchdog.missing(0, states) == []


def test_a_rank_that_does_not_answer_may_still_make_its_call():
    states = {0: state(record("all_reduce", 1)), 1: None, 2: state(record("all_reduce", 1))}
    assert not watchdog.deadlocked(states)
    assert "not answering" in watchdog.table(states)


def test_ranks_are_alike_when_every_call_has_its_counterpart():
    done = [record("all_reduce", 2, waiting=False)]
    give, take = record("send", 1, 1, waiting=False), record("recv", 1, 0, waiting=False)
    assert watchdog.alike({0: state(*done), 1: state(*done)})
    assert watchdog.alike({0: state(*done, give), 1: state(*done, take)})
    assert not watchdog.alike({0: state(*done, give), 1: state(*done)})
    assert not watchdog.alike({0: state(*done), 1: state(record("all_reduce", 1, waiting=False))})
    assert not watchdog.alike({0: state(*done, record("all_reduce", 3)), 1: state(*done)})


def test_a_call_that_fell_out_of_the_record_counts_as_made():
    ahead = state(record("all_reduce", 900, waiting=False))
    assert ahead.has_called(record("all_reduce", 3), caller=0)
    assert not ahead.has_called(record("all_reduce", 901), caller=0)


def after(before: dict, *records: Record) -> RankState:
    """A rank that had made these calls before the run, and has made these in it."""
    mine = state(*records)
    mine.calls, mine.calls_before = before | mine.calls, before
    return mine


COLLECTIVE = ("0", "collective", None)


def test_a_run_counts_its_calls_from_1():
    before = {COLLECTIVE: 7}
    states = {rank: after(before, record("all_reduce", 10)) for rank in (0, 2)}
    states[1] = after(before, record("barrier", 10))
    shown = watchdog.of_this_run(states)
    assert watchdog.verdict(shown)[0] == (
        "ranks 0, 2 wait in all_reduce #3: rank 1 waits in barrier #3"
    )
    assert [line.split()[:2] for line in watchdog.table(shown).splitlines()[2:]] == [
        [str(rank), "3"] for rank in WORLD
    ]
    assert watchdog.deadlocked(shown) == watchdog.deadlocked(states) is True
    assert states[0].waits_in.seq == 10


def test_counterparts_keep_one_number_when_a_run_left_them_unequal():
    ahead = after({COLLECTIVE: 1}, record("all_reduce", 2))  # one that nobody waited for
    behind = state(record("all_reduce", 1, waiting=False), returned=True)
    shown = watchdog.of_this_run({0: ahead, 1: behind, 2: None})
    assert watchdog.verdict(shown) == [
        "rank 0 waits in all_reduce #2: rank 1 has returned without making that call"
    ]


def test_messages_of_a_run_count_from_1_on_both_sides():
    give, take = ("0", "send", 1), ("0", "recv", 0)
    dropped = after({give: 4}, record("send", 5, 1, waiting=False))
    dropped.pending, dropped.returned = dropped.recent, True
    states = {0: dropped, 1: after({take: 4}, record("recv", 5, 0)), 2: state(returned=True)}
    assert watchdog.verdict(watchdog.of_this_run(states)) == [
        "rank 1 waits in recv #1 from 0: rank 0 has returned without waiting for its send #1 to 1"
    ]
